"""`disagg crds`: what a cluster must know before it takes a deployment."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated

import typer

from disagg_operator.console import emit
from disagg_operator.crd import crd_yaml, custom_resource_definition


class CrdsOutput(StrEnum):
    """What `disagg crds` prints."""

    yaml = "yaml"
    json = "json"


def crds(
    output: Annotated[CrdsOutput, typer.Option("-o", "--output", help="Form of the output.")] = CrdsOutput.yaml,
) -> None:
    """Print the CustomResourceDefinition: disagg crds | kubectl apply --server-side -f -"""
    if output is CrdsOutput.json:
        emit(json.dumps(custom_resource_definition(), indent=2))
    else:
        emit(crd_yaml().rstrip("\n"))
