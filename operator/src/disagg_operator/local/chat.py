"""Prompts, streamed answers, and their comparison token for token."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from disagg_operator.local.drive import Outcome, percentile

TIE = 1e-4
"""Two log-probabilities closer than this are a tie: rounding differs with the tensor-parallel size."""

TIED_SHARE = 0.01
"""Share of prompts that may differ first at a tie."""

_VOCABULARY = 512
_BLOCK = 32


@dataclass(frozen=True)
class Prompt:
    """Token ids to complete."""

    number: int
    tokens: tuple[int, ...]


@dataclass
class Answer:
    """A streamed completion.

    Attributes:
        tokens: ids of the generated tokens.
        gaps: for each of them, how far the best two log-probabilities lie apart, where it was asked for.
    """

    tokens: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    first_seconds: float = 0.0
    total_seconds: float = 0.0
    error: str = ""

    def outcome(self, prompt: Prompt) -> Outcome:
        """As the progress display wants it."""
        return Outcome(f"prompt-{prompt.number}", len(prompt.tokens), 0, error=self.error)


@dataclass
class Comparison:
    """All answers against those of the single engine."""

    identical: int = 0
    tied: int = 0
    different: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    first_seconds: list[float] = field(default_factory=list)
    reference_first_seconds: list[float] = field(default_factory=list)
    per_token_seconds: list[float] = field(default_factory=list)

    @property
    def prompts(self) -> int:
        """How many were compared or failed."""
        return self.identical + self.tied + len(self.different) + len(self.failures)

    @property
    def good(self) -> bool:
        """Nothing failed, nothing differs, and ties are rare."""
        return not self.different and not self.failures and self.tied <= TIED_SHARE * self.prompts

    def document(self) -> dict[str, Any]:
        """What `-o json` prints."""

        def ranks(values: Sequence[float]) -> dict[str, float]:
            return {f"p{rank}": round(percentile(values, rank), 6) for rank in (50, 99)}

        return {
            "prompts": self.prompts,
            "identical": self.identical,
            "tied": self.tied,
            "different": len(self.different),
            "differences": self.different[:20],
            "failed": len(self.failures),
            "failures": self.failures[:20],
            "timeToFirstToken": ranks(self.first_seconds),
            "referenceTimeToFirstToken": ranks(self.reference_first_seconds),
            "timePerToken": ranks(self.per_token_seconds),
        }


def make_prompts(count: int, longest: int, seed: int) -> list[Prompt]:
    """Prompts of 1 token, of whole blocks and one more or less, and of anything between; some share a beginning."""
    source = random.Random(seed)
    edges = [1, _BLOCK - 1, _BLOCK, _BLOCK + 1, 2 * _BLOCK - 1, 2 * _BLOCK, 2 * _BLOCK + 1, longest]
    lengths = [min(edge, longest) for edge in edges]
    while len(lengths) < count:
        lengths.append(source.randint(1, longest))
    prompts: list[Prompt] = []
    for number, length in enumerate(lengths[:count]):
        tokens = [source.randrange(3, _VOCABULARY) for _ in range(length)]
        if number % 3 == 2:
            # A prefix-cache hit on either side, where caching is on: whole blocks of an earlier prompt.
            earlier = source.choice(prompts).tokens
            shared = min(len(earlier), length - 1) // _BLOCK * _BLOCK
            tokens[:shared] = earlier[:shared]
        prompts.append(Prompt(number, tuple(tokens)))
    return prompts


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    prompt: Prompt,
    generate: int,
    params: Mapping[str, Any] | None = None,
) -> Answer:
    """Stream one greedy completion of exactly `generate` tokens.

    Args:
        params: `kv_transfer_params`, for whoever asks an engine and not the router.
    """
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(prompt.tokens),
        "max_tokens": generate,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "logprobs": 2,
    }
    if params is not None:
        body["kv_transfer_params"] = params
    answer = Answer()
    started = time.monotonic()
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                answer.error = f"HTTP {response.status}: {(await response.text())[:300]}"
                return answer
            async for line in response.content:
                _take(answer, line, started)
                # A line that has come already is read without a pause: a fast stream would hold up all others here.
                await asyncio.sleep(0)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.total_seconds = time.monotonic() - started
    if not answer.error and len(answer.tokens) != generate:
        answer.error = f"{len(answer.tokens)} tokens came, {generate} were asked for"
    return answer


def _take(answer: Answer, line: bytes, started: float) -> None:
    if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
        return
    chunk = json.loads(line.removeprefix(b"data: "))
    if "error" in chunk:
        answer.error = json.dumps(chunk["error"])[:300]
        return
    for choice in chunk.get("choices", []):
        tokens = choice.get("token_ids") or []
        if tokens and not answer.tokens:
            answer.first_seconds = time.monotonic() - started
        answer.tokens += tokens
        for best in (choice.get("logprobs") or {}).get("top_logprobs") or []:
            values = sorted((best or {}).values(), reverse=True)
            answer.gaps.append(values[0] - values[1] if len(values) > 1 else float("inf"))


def compare(prompts: Sequence[Prompt], answers: Sequence[tuple[Answer, Answer]]) -> Comparison:
    """Compare each answer with the single engine's."""
    result = Comparison()
    for prompt, (answer, reference) in zip(prompts, answers, strict=True):
        error = answer.error or (f"single engine: {reference.error}" if reference.error else "")
        if error:
            result.failures.append(f"prompt {prompt.number} ({len(prompt.tokens)} tokens): {error}")
            continue
        result.first_seconds.append(answer.first_seconds)
        result.reference_first_seconds.append(reference.first_seconds)
        if len(answer.tokens) > 1:
            result.per_token_seconds.append((answer.total_seconds - answer.first_seconds) / (len(answer.tokens) - 1))
        if answer.tokens == reference.tokens:
            result.identical += 1
            continue
        first = next(
            index for index, pair in enumerate(zip(answer.tokens, reference.tokens, strict=True)) if pair[0] != pair[1]
        )
        gap = reference.gaps[first] if first < len(reference.gaps) else float("inf")
        if gap <= TIE:
            result.tied += 1
        else:
            result.different.append(
                f"prompt {prompt.number} ({len(prompt.tokens)} tokens): token {first} is {answer.tokens[first]}, the "
                f"single engine's {reference.tokens[first]}, {gap:.2e} apart"
            )
    return result
