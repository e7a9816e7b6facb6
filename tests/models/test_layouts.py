"""Layers as other libraries quantised and stored them: read here, they are the weights that the libraries dequantise."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from shutil import copyfile
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from rooftile.weights import QuantisedWeight
from rooftile.weights.files.plan import plan_of
from rooftile.weights.packing import OFFSET, unpack
from scripts.write_layout_vectors import FOLDER, LIBRARIES, VERSIONS

# computed by the library from what it stores
COMPUTED = ("dequantised", "numbers")


def sections_of(library: str) -> dict[str, dict[str, Any]]:
    """Returns the `quantization_config` of each layer of a file."""
    with safe_open(FOLDER / f"{library}.safetensors", framework="pt") as file:
        return json.loads(file.metadata()["sections"])


LAYERS = [(library, layer) for library in VERSIONS for layer in sections_of(library)]


def read(library: str, layer: str, folder: Path) -> tuple[QuantisedWeight, dict[str, Tensor]]:
    """Returns a layer as `Decoder.from_folder` reads its tensors, and the tensors."""
    section = sections_of(library)[layer]
    (folder / "config.json").write_text(json.dumps({"quantization_config": section}))
    path = folder / "model.safetensors"
    # its header says what torchao's tensors are
    copyfile(FOLDER / f"{library}.safetensors", path)
    stored = {key.removeprefix(f"{layer}."): x for key, x in load_file(path).items() if key.startswith(f"{layer}.")}
    given = {key: x for key, x in stored.items() if key not in COMPUTED}
    reader = plan_of("auto", folder)
    assert reader.covers(layer)
    needed, optional = reader.suffixes(layer)
    assert {*needed} <= {*given} <= {*needed, *optional}
    whole = next(stored[key] for key in ("numbers", "weight", "_weight_qdata") if key in stored)
    return reader.read(layer, given, tuple(whole.shape)), stored


@pytest.mark.parametrize(("library", "layer"), LAYERS)
def test_a_layer_is_the_weight_that_its_library_dequantises(library: str, layer: str, tmp_path: Path) -> None:
    found, stored = read(library, layer, tmp_path)
    due = stored["dequantised"]
    # a large layer has some rows stored
    step = found.shape[0] // due.shape[0]
    assert torch.equal(found.dequantise(due.dtype)[::step], due)
    if "numbers" in stored:
        ones = replace(found, scales=torch.ones_like(found.scales))
        assert torch.equal(ones.dequantise(), stored["numbers"].float())
    else:
        codes = unpack(found.codes, found.shape[1]).to(torch.int8) - OFFSET if found.format == "int4" else found.codes
        assert torch.equal(codes.view(torch.uint8), stored.get("weight", stored.get("_weight_qdata")).view(torch.uint8))


@pytest.mark.parametrize("library", VERSIONS)
def test_files_are_what_the_libraries_write(library: str) -> None:
    try:
        found = version(library)
    except PackageNotFoundError:
        found = "none"
    if found != VERSIONS[library]:
        pytest.skip(f"{library} {VERSIONS[library]} wrote the file, and {found} is installed")
    made, path = LIBRARIES[library](), FOLDER / f"{library}.safetensors"
    due = load_file(path)
    assert made.tensors.keys() == due.keys()
    for name, x in made.tensors.items():
        assert torch.equal(x, due[name]), name
    assert made.sections == sections_of(library)
