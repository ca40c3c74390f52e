"""Every published trace file: what it is read as, or the words of its refusal."""

from collections import Counter
from pathlib import Path

import pytest

from kvtier.errors import TraceError
from kvtier.traces import load

# file: (format, programs, steps)
READ = {
    "agentic/claude_code_steps.jsonl.gz": ("claude-code-steps", 172, 11358),
    "serving/mooncake_conversation_trace.jsonl.gz": ("mooncake", 8108, 12031),
    "derived_odd/crlf_bom.jsonl": ("claude-code", 1, 10),
    "derived_odd/mixed_time_zones.jsonl": ("claude-code", 1, 10),
    "derived_odd/torn_last_line.jsonl": ("claude-code", 1, 8),
    "fixtures/agent-history/compaction/claude/session_with_compaction.jsonl": ("claude-code", 1, 6),
    "fixtures/agent-history/forks/claude_forked_session.jsonl": ("claude-code", 1, 7),
    "fixtures/agent-history/rejections/claude_with_rejection.jsonl": ("claude-code", 1, 6),
    "fixtures/agent-history/v1/claude_golden.jsonl": ("claude-code", 1, 3),
    "fixtures/claude-code-log/edge_cases.jsonl": ("claude-code", 1, 4),
    "fixtures/claude-code-log/representative_messages.jsonl": ("claude-code", 1, 5),
    "fixtures/claude-code-log/todowrite_examples.jsonl": ("claude-code", 1, 6),
    "transcripts/claude-code/cc_2_0_64_20.jsonl": ("claude-code", 1, 66),
    "transcripts/claude-code/cc_2_0_76_09.jsonl": ("claude-code", 1, 13),
    "transcripts/claude-code/cc_2_1_12_03.jsonl": ("claude-code", 1, 57),
    "transcripts/claude-code/cc_2_1_15_23.jsonl": ("claude-code", 1, 29),
    "transcripts/claude-code/cc_2_1_19_24.jsonl.gz": ("claude-code", 2, 53),
    "transcripts/claude-code/cc_2_1_22_22.jsonl": ("claude-code", 1, 46),
    "transcripts/claude-code/cc_2_1_23_25.jsonl": ("claude-code", 2, 34),
    "transcripts/claude-code/cc_2_1_29_05.jsonl": ("claude-code", 1, 22),
    "transcripts/claude-code/cc_2_1_29_15.jsonl": ("claude-code", 1, 8),
    "transcripts/claude-code/cc_2_1_30_04.jsonl.gz": ("claude-code", 9, 215),
    "transcripts/claude-code/cc_2_1_30_18.jsonl": ("claude-code", 1, 14),
    "transcripts/claude-code/cc_2_1_31_16.jsonl": ("claude-code", 1, 10),
    "transcripts/claude-code/cc_2_1_32_10.jsonl.gz": ("claude-code", 1, 207),
    "transcripts/claude-code/cc_2_1_33_13.jsonl": ("claude-code", 1, 14),
    "transcripts/claude-code/cc_2_1_36_14.jsonl": ("claude-code", 1, 11),
    "transcripts/claude-code/cc_2_1_37_11.jsonl": ("claude-code", 1, 10),
    "transcripts/claude-code/cc_2_1_38_19.jsonl": ("claude-code", 1, 20),
    "transcripts/claude-code/cc_2_1_3_17.jsonl": ("claude-code", 1, 22),
    "transcripts/claude-code/cc_2_1_41_21.jsonl": ("claude-code", 2, 27),
    "transcripts/claude-code/cc_2_1_42_06.jsonl.gz": ("claude-code", 1, 93),
    "transcripts/claude-code/cc_2_1_5_01.jsonl.gz": ("claude-code", 1, 147),
    "transcripts/claude-code/cc_2_1_5_08.jsonl.gz": ("claude-code", 1, 118),
    "transcripts/claude-code/cc_2_1_7_00.jsonl.gz": ("claude-code", 2, 68),
    "transcripts/claude-code/cc_2_1_7_02.jsonl.gz": ("claude-code", 1, 225),
    "transcripts/claude-code/cc_2_1_7_07.jsonl.gz": ("claude-code", 1, 69),
    "transcripts/claude-code/cc_2_1_7_12.jsonl": ("claude-code", 1, 9),
    "transcripts/claude-code-subagents/*.jsonl": ("claude-code", 1, 11),
    "transcripts/claude-code-subagents/*/subagents/agent-*.jsonl": ("claude-code", 1, 2),
}

# file or pattern: key words of the one-line error
REFUSED = {
    "README.md": "this is no trace",
    "agentic/lmcache_*.jsonl.gz": "LMCache agent rows",
    "agentic/tracelab_rounds_claude.jsonl": "TraceLab rounds",
    "agentic/weka_*.jsonl.gz": "WEKA kv-cache-tester",
    "agentic/weka_native/*.json": "WEKA kv-cache-tester",
    "fixtures/agent-history/compaction/codex/session_with_compaction.jsonl": "Codex rollout",
    "fixtures/agent-history/rejections/gemini_with_tool_error.jsonl": "Gemini CLI session",
    "fixtures/agent-history/telemetry/claude_history.jsonl": "Claude Code prompt history",
    "fixtures/agent-history/telemetry/codex_history.jsonl": "Codex prompt history",
    "fixtures/agent-history/telemetry/gemini_logs.json": "Gemini CLI file",
    "fixtures/agent-history/v1/codex_golden.jsonl": "Codex rollout",
    "fixtures/agent-history/v1/gemini_golden.json": "Gemini CLI file",
    "fixtures/agent-sessions/antigravity/*": "Antigravity session",
    "fixtures/agent-sessions/claude/large.jsonl": "no model call with token counts",
    "fixtures/agent-sessions/codex/*": "Codex rollout",
    "fixtures/agent-sessions/codex_05*": "Codex rollout",
    "fixtures/agent-sessions/copilot/**/*": "Copilot CLI session",
    "fixtures/agent-sessions/cursor/*": "Cursor chat",
    "fixtures/agent-sessions/droid/*": "Droid session",
    "fixtures/agent-sessions/gemini/*": "Gemini CLI file",
    "fixtures/agent-sessions/grok/chat_history.jsonl": "Grok chat",
    "fixtures/agent-sessions/grok/summary.json": "JSON of a kind that is not known",
    "fixtures/agent-sessions/hermes/*": "JSON of a kind that is not known",
    "fixtures/agent-sessions/kimi/*": "Kimi session",
    "fixtures/agent-sessions/opencode/**/*": "JSON of a kind that is not known",
    "fixtures/agent-sessions/pi/*": "pi session",
    "fixtures/agent-sessions/qwen/*": "Qwen Code session",
    "fixtures/agent-sessions/session_*.jsonl": "early Codex session",
    "fixtures/specstory/musecode/*": "Muse Code session",
    "fixtures/specstory/piagent/*": "pi session",
    "fixtures/specstory/qwencode/*": "Qwen Code session",
    "serving/azure_llm_2023_code.csv": "Azure LLM trace",
    "transcripts/aider/analytics.jsonl": "Aider analytics",
    "transcripts/codex/*": "Codex rollout",
    "transcripts/gemini/*": "Gemini CLI file",
    "transcripts/mini-swe-agent/*": "mini-swe-agent",
    "transcripts/openhands/events.jsonl": "OpenHands events",
    "transcripts/openhands/llm-logs/*": "OpenHands completion log",
    "transcripts/otel/*": "OpenTelemetry dump",
    "transcripts/pi/*": "pi session",
    "transcripts/swe-agent/*": "SWE-agent trajectory",
}


def matching(root: Path, pattern: str) -> list[Path]:
    """Files below `root` that the pattern names; `**` goes down, `*` stays in one folder."""
    return sorted(path for path in root.glob(pattern) if path.is_file())


@pytest.mark.parametrize("pattern", sorted(READ))
def test_a_readable_file_gives_its_programs_and_steps(traces_dir: Path, pattern: str) -> None:
    files = matching(traces_dir, pattern)
    assert files
    for file in files:
        trace = load(file)
        assert (trace.format, trace.num_programs, trace.num_steps) == READ[pattern], file


@pytest.mark.parametrize("pattern", sorted(REFUSED))
def test_any_other_file_is_refused_in_one_line(traces_dir: Path, pattern: str) -> None:
    files = matching(traces_dir, pattern)
    assert files
    for file in files:
        with pytest.raises(TraceError) as caught:
            load(file)
        message = str(caught.value)
        assert REFUSED[pattern] in message, file
        assert file.name in message
        assert "\n" not in message


def test_the_table_names_every_file_exactly_once(traces_dir: Path) -> None:
    covered = Counter(
        path for pattern in [*READ, *REFUSED] for path in matching(traces_dir, pattern)
    )
    files = [path for path in traces_dir.rglob("*") if path.is_file()]
    assert [path for path in files if covered[path] != 1] == []
