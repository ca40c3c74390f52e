"""CONCUR's law: U < U_low grows W, U > U_high with H < H_thresh cuts it, anything else holds."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.scheduling import Concur, ConcurSettings
from kvtier.scheduling.admission import Load
from kvtier.scheduling.events import EngineStats

from .scene import PROPERTY, scene

LAW = ConcurSettings(initial_window=16.0, interval_s=1.0, hit_window_s=5.0)
MANY = Load(num_active=16, num_held=0, num_live=100)
CAPACITY = 1000


@dataclass
class Meter:
    """Feeds an admission with counters that grow as an engine's do."""

    concur: Concur
    now_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def observe(
        self, usage: float, hits: float | None, load: Load = MANY, after_s: float = 1.0
    ) -> float:
        """Pass `after_s`, prefill 1000 tokens at this hit rate (None: no prefill); W after it."""
        self.now_s += after_s
        if hits is not None:
            self.prompt_tokens += 1000
            self.cached_tokens += round(1000 * hits)
        counters = (self.prompt_tokens, self.cached_tokens)
        stats = EngineStats("w", round(CAPACITY * usage), CAPACITY, *counters)
        self.concur.observe(stats, load, self.now_s)
        return self.window()

    def window(self) -> float:
        return self.concur.program_window("w")


def meter(law: ConcurSettings = LAW, load: Load = MANY) -> Meter:
    """A law that has seen one reading, so that the next one is judged."""
    made = Meter(Concur(law))
    made.observe(0.3, 0.5, load)
    return made


def test_the_published_constants_are_the_defaults() -> None:
    law = ConcurSettings()
    assert (law.alpha, law.beta) == (2.0, 0.5)
    assert (law.u_low, law.u_high, law.h_thresh) == (0.2, 0.5, 0.2)


def test_low_usage_grows_the_window_by_alpha() -> None:
    assert meter().observe(0.1, 0.9) == 18


def test_low_usage_grows_whatever_the_hit_rate() -> None:
    assert meter().observe(0.1, 0.0) == 18
    assert meter().observe(0.1, None) == 18


def test_high_usage_with_few_hits_halves_the_window() -> None:
    m = meter(replace(LAW, hit_window_s=1.0))
    assert m.observe(0.9, 0.0) == 8
    assert m.concur.num_cuts == 1


@pytest.mark.parametrize(
    ("usage", "hits"),
    [(0.2, 0.0), (0.35, 0.0), (0.5, 0.0), (0.9, 0.2), (0.9, 0.9), (0.35, 0.9)],
)
def test_the_band_between_and_a_healthy_cache_hold_the_window(usage: float, hits: float) -> None:
    assert meter(replace(LAW, hit_window_s=1.0)).observe(usage, hits) == 16


def test_an_unknown_hit_rate_never_cuts() -> None:
    m = Meter(Concur(LAW))
    for _ in range(20):
        assert m.observe(1.0, None) == 16
    assert m.concur.num_cuts == 0


def test_the_hit_rate_is_taken_over_the_window_not_since_the_start() -> None:
    m = meter(replace(LAW, hit_window_s=3.0))
    for _ in range(50):
        m.observe(0.3, 1.0)
    for _ in range(3):
        m.observe(0.3, 0.0)
    assert m.concur.hit_rate("w") == 0.0
    assert m.observe(0.9, 0.0) == 8


def test_prefills_older_than_the_window_leave_the_hit_rate_unknown() -> None:
    m = meter(replace(LAW, hit_window_s=3.0))
    m.observe(0.3, 0.0)
    for _ in range(5):
        m.observe(0.3, None)
    assert m.concur.hit_rate("w") is None
    assert m.observe(0.9, None) == 16


def test_one_congestion_is_cut_once_until_the_marked_programs_have_stopped() -> None:
    m = meter(replace(LAW, hit_window_s=1.0))
    assert m.observe(0.9, 0.0) == 8
    for num_active in (16, 12, 9):
        assert m.observe(0.9, 0.0, replace(MANY, num_active=num_active)) == 8
    assert m.concur.num_cuts == 1


def test_after_a_cut_the_hit_rate_is_taken_afresh() -> None:
    m = meter(replace(LAW, hit_window_s=60.0))
    for _ in range(3):
        m.observe(0.3, 0.0)
    assert m.observe(0.9, 0.0) == 8
    few = replace(MANY, num_active=8)
    assert m.observe(0.9, 0.0, few) == 8, "prefills of the old congestion are not judged again"
    assert m.observe(0.9, 0.0, few) == 4, "a congestion that goes on is a new one"
    assert m.concur.num_cuts == 2


def test_while_a_cut_takes_effect_the_window_does_not_grow_either() -> None:
    m = meter(replace(LAW, hit_window_s=1.0))
    m.observe(0.9, 0.0)
    assert m.observe(0.0, 0.9, replace(MANY, num_active=9)) == 8
    m.observe(0.0, 0.9, replace(MANY, num_active=8))
    assert m.observe(0.0, 0.9, replace(MANY, num_active=8)) > 8


def test_cuts_stop_at_the_lower_bound() -> None:
    law = replace(LAW, min_window=3.0, hit_window_s=1.0)
    m = meter(law)
    for _ in range(20):
        m.observe(0.9, 0.0, replace(MANY, num_active=1))
    assert m.window() == 3
    assert m.concur.num_cuts == 3, "16 to 8 to 4 to 3; at the bound nothing is cut"


def test_growth_ends_at_the_number_of_live_programs() -> None:
    m = meter()
    for _ in range(20):
        m.observe(0.0, None, replace(MANY, num_live=19))
    assert m.window() == 19


def test_nothing_is_judged_before_the_interval_has_passed() -> None:
    m = meter(replace(LAW, interval_s=10.0))
    for _ in range(8):
        assert m.observe(0.0, None) == 16
    assert m.observe(0.0, None, after_s=3.0) == 18
    assert m.observe(0.0, None, after_s=9.0) == 18


def test_concur_does_not_grow_on_hits_and_concur_plus_does_while_programs_are_held() -> None:
    held = replace(MANY, num_held=5)
    plus = replace(LAW, grow_on_hits=True)
    assert meter(LAW).observe(0.4, 0.9, held) == 16
    assert meter(plus).observe(0.4, 0.9, held) == 18
    assert meter(plus).observe(0.9, 0.9, held) == 18
    assert meter(plus).observe(0.4, 0.9) == 16, "nobody is held"
    assert meter(replace(plus, hit_window_s=1.0)).observe(0.4, 0.1, held) == 16, "few hits"


def test_concur_plus_takes_an_unknown_hit_rate_for_no_reason_to_grow() -> None:
    m = Meter(Concur(replace(LAW, grow_on_hits=True)))
    for _ in range(5):
        assert m.observe(0.4, None, replace(MANY, num_held=5)) == 16


def test_concur_plus_cuts_as_concur_does() -> None:
    m = meter(replace(LAW, grow_on_hits=True, hit_window_s=1.0))
    assert m.observe(0.9, 0.0, replace(MANY, num_held=5)) == 8


def test_every_worker_has_its_own_window_and_a_lost_one_starts_afresh() -> None:
    m = meter()
    m.observe(0.0, None)
    assert (m.window(), m.concur.program_window("other")) == (18, 16)
    m.concur.forget("w")
    assert m.window() == 16


READINGS = st.lists(
    st.tuples(
        st.floats(0.0, 1.0),
        st.none() | st.floats(0.0, 1.0),
        st.integers(0, 40),
        st.integers(0, 10),
        st.integers(1, 40),
        st.floats(0.0, 5.0),
    ),
    max_size=60,
)


@PROPERTY
@given(READINGS, st.booleans(), st.integers(1, 8))
def test_the_window_keeps_its_bounds_and_moves_only_by_the_law(
    readings: list[tuple[float, float | None, int, int, int, float]], plus: bool, floor: int
) -> None:
    law = replace(LAW, grow_on_hits=plus, min_window=float(floor), hit_window_s=2.0)
    m = Meter(Concur(law))
    pending = False
    for usage, hits, num_active, num_held, num_live, after_s in readings:
        before, cuts = m.window(), m.concur.num_cuts
        after = m.observe(usage, hits, Load(num_active, num_held, num_live), after_s)
        assert floor <= after
        assert after <= max(before, num_live), "growth past the live programs"
        assert after <= before + law.alpha
        pending = pending and num_active > before
        if after < before:
            assert usage > law.u_high
            assert not pending, "a second cut for one congestion"
            few, many = min(before, num_live), min(before + 1, num_live)
            assert max(floor, math.floor(few * law.beta)) <= after
            assert after <= max(floor, math.floor(many * law.beta))
            assert m.concur.num_cuts == cuts + 1
            pending = True
        if after > before:
            assert usage < law.u_low or (plus and num_held > 0)


@PROPERTY
@given(READINGS)
def test_without_congestion_nothing_is_ever_cut(
    readings: list[tuple[float, float | None, int, int, int, float]],
) -> None:
    m = Meter(Concur(LAW))
    for usage, _, num_active, num_held, num_live, after_s in readings:
        m.observe(usage, 0.9, Load(num_active, num_held, num_live), after_s)
    assert m.concur.num_cuts == 0


def paused_by_a_cut(policy: str) -> set[str]:
    """Four programs act, `a` the idlest and `d` the latest; W falls from 4 to 2."""
    s = scene(
        policy, "concur", hbm_tokens=1000, dram_tokens=1000, concur=replace(LAW, initial_window=4.0)
    )
    s.step("a", 100, 0.0, 1.0)
    s.step("b", 100, 2.0, 40.0)
    s.step("c", 100, 41.0, 90.0)
    s.step("d", 100, 91.0, 140.0)
    s.at(149.0).stats(900, 0, 0)
    s.at(150.0).stats(900, 1000, 0)
    return {name for name, queue in s.queues().items() if queue != "gpu"}


def test_on_a_cut_mori_pauses_the_most_idle_and_lru_the_latest_admitted() -> None:
    assert paused_by_a_cut("mori") == {"a", "b"}
    assert paused_by_a_cut("lru") == {"c", "d"}


def test_lru_pauses_the_latest_admitted_even_when_it_has_just_come() -> None:
    s = scene("lru", "concur", hbm_tokens=1000, concur=replace(LAW, initial_window=2.0))
    s.step("a", 100, 0.0, 1.0)
    s.step("b", 100, 8.0, 9.0)
    s.stats(900, 0, 0)
    s.at(10.0).stats(900, 1000, 0)
    assert s.queues() == {"a": "gpu", "b": "waiting"}


def test_a_cut_never_stops_a_running_inference() -> None:
    s = scene("lru", "concur", hbm_tokens=1000, concur=replace(LAW, initial_window=2.0))
    s.ask("a", 100)
    s.ask("b", 100)
    s.at(9.0).stats(900, 0, 0)
    s.at(10.0).stats(900, 1000, 0)
    assert s.running() == {"a", "b"}
    assert s.marked() == {"b"}
    s.at(11.0).finish("b")
    assert s.queues() == {"a": "gpu", "b": "waiting"}


def test_paused_programs_come_back_in_order_and_before_new_ones() -> None:
    law = replace(LAW, initial_window=3.0, hit_window_s=1.0)
    s = scene("lru", "concur", hbm_tokens=1000, concur=law)
    for name, start_s in (("a", 0.0), ("b", 10.0), ("c", 20.0)):
        s.step(name, 10, start_s, start_s + 1.0)
    s.at(30.0).stats(900, 0, 0)
    s.at(31.0).stats(900, 1000, 0)
    assert s.queues() == {"a": "gpu", "b": "waiting", "c": "waiting"}
    for name in ("new", "b", "c"):
        s.ask(name, 10)
    s.at(40.0).stats(0, 1000, 0)
    assert s.scheduler.admission.program_window("w") == 3
    assert (s.running(), s.held()) == ({"b", "c"}, {"new"})
