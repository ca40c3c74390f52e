"""`TieredRuntime` with real pages: every byte that a program reads is one that it wrote."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from random import Random

import numpy as np
import pytest
import torch

from kvtier.errors import CapacityError, ConfigError, TieringError, TreeError, WaitTimeoutError
from kvtier.ids import Label
from kvtier.layout import KVDtype, KVLayout, Segment
from kvtier.runtime import Program, TieredRuntime
from kvtier.scheduling import POLICIES, SchedulerSettings
from kvtier.tree.node import Tier

PAGE = 4
LAYOUT = KVLayout(
    (Segment("k0", 0, 32), Segment("v0", 0, 32), Segment("kv1", 1, 24)), KVDtype.BF16, PAGE
)
REAL = [name for name, spec in POLICIES.items() if not spec.unbounded]


def runtime(hbm_pages: int = 16, dram_pages: int = 64, **more: object) -> TieredRuntime:
    more = {"ticks": False} | more
    return TieredRuntime(
        LAYOUT,
        hbm_tokens=hbm_pages * PAGE,
        dram_tokens=dram_pages * PAGE,
        **more,  # type: ignore[arg-type]
    )


@pytest.fixture
def kv() -> Iterator[TieredRuntime]:
    with runtime() as made:
        yield made
        made.settle()
        made.check_integrity()


class Agent:
    """Grows one prompt, and knows what its KV must be: a hash of all tokens up to each page."""

    def __init__(self, program: Program, runtime: TieredRuntime, head: list[int]) -> None:
        self.program = program
        self.runtime = runtime
        self.tokens = list(head)
        self.num_read = 0

    def content(self, page: int, tokens: list[int]) -> torch.Tensor:
        seed = hash(tuple(tokens[: (page + 1) * PAGE])) % 2**31
        generator = torch.Generator().manual_seed(seed)
        size = (self.runtime.page_bytes,)
        return torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)

    def step(self, prompt: list[int], output: list[int]) -> None:
        """One inference; what is cached is read and compared, the rest is computed."""
        self.tokens += prompt
        with self.program.inference(self.tokens, new_tokens=len(output)) as call:
            cached = call.cached_tokens // PAGE
            for page, row in enumerate(call.read(0, cached)):
                assert torch.equal(row, self.content(page, self.tokens)), (self.program.name, page)
            self.num_read += cached
            call.extend(output)
            self.tokens += output
            rows = [self.content(page, self.tokens) for page in range(cached, call.pages.size)]
            if rows:
                call.write(cached, torch.stack(rows))


def run_agents(kv: TieredRuntime, num_agents: int, num_steps: int, seed: int) -> list[Agent]:
    choose = Random(seed)
    head = choose.choices(range(1000), k=6)
    agents = [Agent(kv.program(f"agent-{n}"), kv, head) for n in range(num_agents)]
    for _ in range(num_steps):
        for agent in choose.sample(agents, len(agents)):
            agent.step(choose.choices(range(1000), k=5), choose.choices(range(1000), k=3))
            agent.program.tool_called("bash")
            if choose.random() < 0.3:
                kv.tick()
    return agents


@pytest.mark.parametrize("policy", REAL)
def test_many_programs_in_little_hbm_read_what_they_wrote(policy: str) -> None:
    with runtime(policy=policy) as kv:
        agents = run_agents(kv, num_agents=8, num_steps=5, seed=1)
        kv.settle()
        kv.check_integrity()
        counters = kv.counters()
        assert sum(agent.num_read for agent in agents) > 0
        if POLICIES[policy].offload:
            assert counters.loaded > 20
        for agent in agents:
            agent.program.release()
        kv.check_integrity()


def test_threads_that_run_programs_at_once_read_what_they_wrote() -> None:
    failed: list[BaseException] = []

    def live(kv: TieredRuntime, number: int) -> None:
        try:
            choose = Random(number)
            agent = Agent(kv.program(f"agent-{number}"), kv, [1, 2, 3, 4, 5, 6])
            for _ in range(5):
                agent.step(choose.choices(range(1000), k=5), choose.choices(range(1000), k=3))
                agent.program.tool_called("bash")
            agent.program.release()
        except BaseException as error:
            failed.append(error)

    settings = SchedulerSettings(tick_s=0.01, swap_min_gap_s=0.0, dwell_s=0.0, swap_when_idle=True)
    with runtime(hbm_pages=24, ticks=True, settings=settings) as kv:
        threads = [threading.Thread(target=live, args=(kv, number)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        kv.settle()
        kv.check_integrity()
    assert not failed


def test_asyncio_programs_wait_without_blocking_the_loop(kv: TieredRuntime) -> None:
    order: list[str] = []

    async def call(name: str, num_tokens: int, hold: asyncio.Event | None) -> None:
        async with kv.program(name).inference([1] * num_tokens) as inference:
            await inference.extend_async([2] * PAGE)
            order.append(name)
            if hold is not None:
                await hold.wait()

    async def main() -> None:
        hold = asyncio.Event()
        first = asyncio.create_task(call("a", 12 * PAGE, hold))
        while not order:
            await asyncio.sleep(0.001)
        second = asyncio.create_task(call("b", 12 * PAGE, None))
        await asyncio.sleep(0.05)
        assert order == ["a"]
        hold.set()
        await asyncio.gather(first, second)

    asyncio.run(asyncio.wait_for(main(), 30))
    assert order == ["a", "b"]


def test_views_are_the_pool_itself(kv: TieredRuntime) -> None:
    with kv.program("p").inference(range(3 * PAGE)) as call:
        pages = call.pages
        for view, other in zip(kv.segments("numpy"), kv.segments("torch"), strict=True):
            assert view.shape[0] == kv.num_pages[Tier.HBM]
            assert view.__array_interface__["data"][0] == other.data_ptr()
            view[pages] = 7
        assert (call.read().numpy() == 7).all()
        assert call.read(1, 2).shape == (1, kv.page_bytes)
    with kv.program("p").inference(range(3 * PAGE)) as call:
        assert call.cached_tokens == 3 * PAGE
        assert (call.read().numpy() == 7).all()


def test_match_tells_what_is_where(kv: TieredRuntime) -> None:
    program = kv.program("p")
    assert program.match([1, 2, 3, 4, 5]) == (0, 0)
    with program.inference([1] * 10):
        pass
    assert program.match([1] * 10) == (8, 0)
    assert program.match([1] * 5 + [2] * 5) == (4, 0)


def test_a_program_is_demoted_and_prefetched_by_hand(kv: TieredRuntime) -> None:
    program = kv.program("p")
    assert program.demote().result(10) is False  # it holds nothing
    with program.inference([1] * 12 * PAGE) as call:
        call.write(0, torch.full((12, kv.page_bytes), 3, dtype=torch.uint8))
        assert program.demote().result(10) is False  # it runs
    assert program.demote().result(10) is True
    assert kv.counters().demoted == 12
    with kv.program("other").inference([2] * 16 * PAGE):
        assert program.match([1] * 12 * PAGE) == (0, 12 * PAGE)
        assert program.prefetch().result(10) is False
    kv.program("other").release()
    assert program.prefetch().result(10) is True
    assert program.match([1] * 12 * PAGE) == (12 * PAGE, 0)
    with program.inference([1] * 12 * PAGE) as call:
        assert (call.read() == 3).all()


def test_an_exception_ends_the_call_and_keeps_what_was_published(kv: TieredRuntime) -> None:
    program = kv.program("p")
    call = program.inference([1] * 8)
    call.start().result(10)
    call.publish()
    call.extend([2] * 8)
    call.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    assert program.match([1] * 8 + [2] * 8) == (8, 0)
    with program.inference([1] * 8) as call:
        assert call.cached_tokens == 8


def test_a_wait_ends_when_its_time_is_over_and_nothing_is_left_of_it(kv: TieredRuntime) -> None:
    with kv.program("a").inference([1] * 12 * PAGE):
        before = kv.counters()
        with pytest.raises(WaitTimeoutError, match=r"waited 0\.02 s for pages"):
            kv.program("b").inference([2] * 12 * PAGE, timeout_s=0.02).__enter__()
        assert kv.counters() == before
    with kv.program("b").inference([2] * 12 * PAGE, timeout_s=10):
        pass


def test_another_thread_may_cancel_a_call_that_waits(kv: TieredRuntime) -> None:
    with kv.program("a").inference([1] * 12 * PAGE):
        waiting = kv.program("b").inference([2] * 12 * PAGE)
        future = waiting.start()
        assert not future.done()
        threading.Thread(target=waiting.cancel).start()
        with pytest.raises(TieringError, match="was cancelled"):
            future.result(10)
        waiting.cancel()


def test_output_beyond_hbm_is_refused_and_the_call_goes_on(kv: TieredRuntime) -> None:
    with kv.program("a").inference([1] * 14 * PAGE) as call:
        with pytest.raises(CapacityError, match="running requests hold HBM"):
            call.extend([2] * 3 * PAGE)
        assert call.tokens.size == 14 * PAGE
        call.extend([2] * 2 * PAGE)
        assert call.pages.size == 16


def test_shared_pages_are_not_written(kv: TieredRuntime) -> None:
    with kv.program("a").inference([1] * 8) as call:
        call.write(0, torch.zeros((2, kv.page_bytes), dtype=torch.uint8))
    with kv.program("b").inference([1] * 8 + [2] * 4) as call:
        with pytest.raises(TieringError, match="others read; write from 2 on"):
            call.write(1, torch.ones((2, kv.page_bytes), dtype=torch.uint8))
        with pytest.raises(TieringError, match="stay within"):
            call.write(2, torch.ones((2, kv.page_bytes), dtype=torch.uint8))
        with pytest.raises(TieringError, match="stay within"):
            call.read(3, 2)


def test_a_closed_runtime_says_so_and_ends_those_who_wait() -> None:
    kv = runtime()
    running = kv.program("a").inference([1] * 12 * PAGE)
    running.start().result(10)
    future = kv.program("b").inference([2] * 12 * PAGE).start()
    kv.close()
    kv.close()
    with pytest.raises(TieringError, match="was closed"):
        future.result(10)
    for use in (running.finish, kv.tick, lambda: kv.program("c")):
        with pytest.raises(TieringError, match="closed"):
            use()


def test_what_fails_in_the_background_is_raised_at_the_next_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kv = runtime()

    def break_down(*_: object, **__: object) -> None:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(kv._worker, "moved", break_down)
    first = kv.program("a")
    with first.inference([1] * 14 * PAGE):
        pass
    future = kv.program("b").inference([2] * 14 * PAGE).start()  # a has to go down for it
    with pytest.raises(TieringError, match="has failed: RuntimeError"):
        future.result(10)
    with pytest.raises(TieringError, match="has failed; make another one"):
        kv.program("c")
    kv.close()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"policy": "moris"}, ConfigError, "did you mean 'mori'"),
        ({"policy": "infinite"}, ConfigError, "bound of the simulator"),
        ({"policy": "mori+concur", "admission": "none"}, ConfigError, "given twice"),
        ({"device": "cuda"}, ConfigError, "device='cuda'"),
        ({"hbm_pages": 0}, ConfigError, "hbm_tokens=0 is less than a page"),
        ({"admission": "fixed:x"}, ConfigError, "count of at least 1"),
    ],
)
def test_settings_that_make_no_runtime(
    arguments: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        runtime(**arguments)  # type: ignore[arg-type]


def test_misuse_has_one_line_each(kv: TieredRuntime) -> None:
    program = kv.program("p")
    with pytest.raises(TieringError, match="at least one token"):
        program.inference([])
    with pytest.raises(TreeError, match="beyond"):
        program.inference([-1])
    with pytest.raises(TieringError, match="new_tokens=-1"):
        program.inference([1], new_tokens=-1)
    with pytest.raises(CapacityError, match="HBM has 16"):
        program.inference([1] * 17 * PAGE).__enter__()
    with pytest.raises(ConfigError, match="CuPy cannot see"):
        kv.segments("cupy")
    with pytest.raises(ConfigError, match="one of torch"):
        kv.segments("jax")
    call = program.inference([1, 2, 3])
    with pytest.raises(TieringError, match="not running"):
        _ = call.pages
    with call:
        with pytest.raises(TieringError, match="started before"):
            call.start()
        with pytest.raises(TieringError, match="still runs"):
            program.release()
    with pytest.raises(TieringError, match="not running"):
        call.finish()
    assert np.array_equal(call.tokens, [1, 2, 3])


def test_what_is_refused_leaves_nobody_waiting(kv: TieredRuntime) -> None:
    with pytest.raises(CapacityError):
        kv.program("p").inference([1] * 17 * PAGE).start()
    with kv.program("p").inference([1] * 14 * PAGE) as call:
        for _ in range(3):
            with pytest.raises(CapacityError):
                call.extend([2] * 3 * PAGE)
    assert not kv._waiting


def test_threads_may_ask_for_one_program_at_once(kv: TieredRuntime) -> None:
    program, made = kv.program("p"), []
    threads = [
        threading.Thread(target=lambda: made.extend(program.inference([1]) for _ in range(500)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({call._request.request for call in made}) == len(made) == 2_000


def test_moves_that_begin_while_it_closes_are_hurried_without_harm() -> None:
    kv = runtime(hbm_pages=40, dram_pages=64)
    for name in "ab":
        with kv.program(name).inference([ord(name)] * 8 * PAGE):
            pass
    with kv._inside() as worker:
        kv._mover.closing = True  # as `close` does before it cancels
        worker.manager.relabel("a", Label.IDLE)
        assert worker.manager.demote("a")
        worker.manager.traffic.hasten()
    kv.settle()
    kv.check_integrity()
    assert kv.counters().write_failed == 8
    kv.close()
