"""Options of a sampler: those that ``up`` takes reach the samplers that it starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from node.cli.main import app
from node.cli.node_options import SamplerOptions
from node.settings import Environment, Places, VllmSettings
from node.swarm import peers_for

HERE = Environment(Places(Path("home")), broker=None, token=None, nats_server=None, cores=4, load=0.0)


@pytest.mark.parametrize(
    "options",
    [
        SamplerOptions.of(),
        SamplerOptions.of(64, "vllm"),
        SamplerOptions.of(command='/opt/a venv/bin/python -m "vllm server" --max-loras 2'),
        SamplerOptions.of(urls=["http://a:8000", "http://b:8000"], adapters=Path("shared dir")),
    ],
)
def test_words_for_a_sampler_say_the_same_again(options: SamplerOptions):
    arguments = ["--role", "sampler", "--run", "x", *options.words]
    given = typer.main.get_command(app).make_context("grpo-node", arguments).params
    names = ("rows", "engine", "vllm_command", "vllm_url", "vllm_adapters")
    assert SamplerOptions.of(*(given[name] for name in names)) == options


def test_anything_about_vllm_means_vllm():
    assert SamplerOptions.of().engine == "transformers"
    assert SamplerOptions.of(command="vllm serve") == SamplerOptions(128, "vllm", VllmSettings("vllm serve"))


def test_samplers_of_a_swarm_get_the_options_and_nobody_else():
    peers = peers_for(1, 2, 1, HERE, sampler_options=("--engine", "vllm"))
    assert {peer.name: peer.options for peer in peers} == {
        "learner-1": (),
        "sampler-1": ("--engine", "vllm"),
        "sampler-2": ("--engine", "vllm"),
        "verifier-1": (),
    }
