"""How much of a prompt is a repeat: the rules used where a trace holds lengths but no hashes."""

from collections.abc import Sequence

# Characters of text per token: 3.5, measured on public Claude Code sessions (entireio/cli) by
# comparing text lengths with the growth of the next prompt.
CHARS_PER_TOKEN = 3.5

# Tools and system text that Claude Code sessions share: about 15k of the 24k to 41k tokens a
# session starts with (entireio/cli sessions); kv-cache-tester counts 10.5k + 2.6k (medians).
CLAUDE_HEAD_TOKENS = 15_000


def output_tokens(num_chars: int) -> int:
    """Tokens of a reply of `num_chars` characters (text, thinking, tool input); at least 1."""
    return max(1, round(num_chars / CHARS_PER_TOKEN))


def claude_head(
    versions: Sequence[str], first_context_tokens: int, *, is_subagent: bool
) -> tuple[str, int]:
    """The shared group of a Claude Code program and the tokens of its head.

    The group is `claude-code` with the first two numbers of the version, since the tool and
    system text changes with releases; a sub-agent has another system text, hence its own group.
    The head is 15k tokens and never above half of the first context, so that a short session
    keeps private tokens.
    """
    release = ".".join(versions[0].split(".")[:2]) if versions else ""
    group = "claude-code" + (f"-{release}" if release else "") + ("-agent" if is_subagent else "")
    return group, min(CLAUDE_HEAD_TOKENS, first_context_tokens // 2)


def reused_tokens(
    previous: tuple[int, int], context_tokens: int, head_tokens: int, *, compacted: bool
) -> int:
    """Leading tokens of a prompt that repeat the previous prompt and its output.

    `previous` is (context_tokens, output_tokens) of the call before. While the context grows all
    of it is kept; after a compaction, or when it shrank (old tool results taken out of its
    middle), only the shared head is known to survive.
    """
    before_tokens, reply_tokens = previous
    if compacted or context_tokens < before_tokens:
        return min(head_tokens, context_tokens)
    return min(before_tokens + reply_tokens, context_tokens)
