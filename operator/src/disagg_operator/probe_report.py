"""What `disagg probe` prints: the part of a spec to declare, and why. Pure, but for reading the ranks' files."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disagg_operator.documents import UsageError
from disagg_operator.planning import geometry_spec
from disagg_operator.yaml_text import dump
from disagg_plan.dtypes import dtype_bytes
from disagg_plan.probe_facts import MAX_FILE_BYTES, RankFacts, decode_facts
from disagg_plan.probed import Files, Merged, merge
from disagg_plan.probed_choice import Choice, choose
from disagg_plan.ranges import format_ranges
from disagg_plan.topology import default_stages

_WIDTH = 110


@dataclass(frozen=True)
class Report:
    """What was found in a started engine."""

    merged: Merged
    choice: Choice

    @property
    def spec(self) -> dict[str, Any]:
        """What to declare under `spec`."""
        facts, choice = self.merged.facts, self.choice
        model: dict[str, Any] = {"name": facts.model}
        if facts.revision is not None:
            model["revision"] = facts.revision
        geometry = geometry_spec(self.merged.geometry, dtype_bytes(facts.dtype))
        model["geometry"] = geometry.model_dump(by_alias=True, exclude_none=True, mode="json")
        for group in model["geometry"]["groups"]:
            if group["table"] == group["name"]:
                del group["table"]
        engine: dict[str, Any] = {"name": facts.engine, "version": facts.version, "backend": facts.backend}
        if choice.profile is None:
            engine["pages"] = choice.pages
        cache = {"dtype": facts.dtype, "blockSize": facts.block_tokens, "layout": choice.layout}
        return {"model": model, "engine": engine, "kvCache": cache}

    @property
    def pipeline_layers(self) -> list[str] | None:
        """`parallelism.pipelineLayers`, where layers are not split evenly."""
        stages = self.merged.stages
        if stages == default_stages(self.merged.geometry.layers, len(stages)):
            return None
        return [format_ranges(stage) for stage in stages]

    def document(self) -> dict[str, Any]:
        """What `-o json` prints."""
        facts, choice = self.merged.facts, self.choice
        return {
            "spec": self.spec,
            "tensor": facts.tensor,
            "pipeline": facts.pipeline,
            "pipelineLayers": self.pipeline_layers,
            "bytesPerToken": self.merged.geometry.bytes_per_token,
            "pages": choice.pages,
            "why": choice.why,
            "profile": choice.profile.name if choice.profile else None,
            "profileSays": choice.profile_says,
            "geometryNeeded": not choice.derived,
            "configSays": choice.config_says,
            "notes": list(choice.notes),
        }

    def text(self) -> str:
        """YAML to paste under `spec`, with what was found and why as comments."""
        facts, choice = self.merged.facts, self.choice
        said = [
            f"{facts.engine} {facts.version}, {facts.backend}, tensor {facts.tensor}, pipeline {facts.pipeline}: "
            f"{self.merged.geometry.bytes_per_token} bytes per token in {len(self.merged.geometry.layers)} layers",
            f"pages are {choice.pages}: {choice.why}",
            choice.profile_says,
            choice.config_says,
            *choice.notes,
        ]
        lines = ["# Found by disagg probe; paste under `spec` of a DisaggDeployment."]
        for sentence in said:
            lines += textwrap.wrap(sentence, _WIDTH, initial_indent="# - ", subsequent_indent="#   ")
        if self.pipeline_layers is not None:
            stages = ", ".join(f'"{stage}"' for stage in self.pipeline_layers)
            lines.append(f"# parallelism: {{pipeline: {facts.pipeline}, pipelineLayers: [{stages}]}}")
        return "\n".join(lines) + "\n" + dump([self.spec])


def make_report(files: Files) -> Report:
    """Judge the facts of all ranks.

    Raises:
        Refusal: as `disagg_plan.probed.merge`.
    """
    merged = merge(files)
    return Report(merged, choose(merged))


def read_rank_files(folder: Path) -> dict[str, RankFacts]:
    """All rank files of a folder by name; empty if there are none.

    Raises:
        UsageError: the folder or a file cannot be read.
        FormatError: a file is not what a probe writes.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder")
    found = {}
    for path in sorted(folder.glob("rank-*.json")):
        try:
            with path.open("rb") as source:
                data = source.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}") from error
        found[path.name] = decode_facts(data, path.name)
    return found
