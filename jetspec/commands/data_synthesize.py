"""`jetspec data synthesize`: the target writes prompts, in one process or several."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from jetspec.commands.data import Machines
from jetspec.commands.data_regenerate import load_target_alone
from jetspec.commands.options import TargetConfig
from jetspec.config import EngineConfig
from jetspec.data.regenerate import places, read_tokenizer
from jetspec.data.synthesize import SynthesizeConfig, UserTurn, plan, synthesize, write_prompts
from jetspec.data.workers import Answer


def synthesize_data(
    out: Path, count: int, config: SynthesizeConfig, model: TargetConfig, machine: Machines, *, dry_run: bool
) -> None:
    config.sampling("")  # refuses bad settings before anything is read
    where = places(model.device, machine.jobs)
    engines = [engine_for(count, len(where), machine, place) for place in where]
    tokenizer, eos_tokens, _ = read_tokenizer(config.model)
    turn = UserTurn(tokenizer, eos_tokens, config.system)
    if dry_run:
        print(plan(out, count, config, turn, where))
        return
    starts = [
        partial(load_writer, config, engine, model.dtype, place, where.count(place))
        for engine, place in zip(engines, where, strict=True)
    ]
    print(write_prompts(out, count, config, turn, starts).summary(out))


def engine_for(count: int, jobs: int, machine: Machines, place: str) -> EngineConfig:
    """Engine settings as for answers, with a batch of at most the prompts to write: more would be discarded."""
    batch = min(machine.engine(place).max_batch, -(-count // jobs))
    return replace(machine, batch=batch).engine(place)


def load_writer(config: SynthesizeConfig, engine: EngineConfig, dtype: str, device: str, sharing: int) -> Answer:
    llm = load_target_alone(config.model, engine, dtype, device, sharing)
    turn = UserTurn(llm.tokenizer, llm.target.eos_tokens, config.system)
    # The end of a user's turn may differ from that of an answer.
    llm.target = replace(llm.target, eos_tokens=turn.end_tokens)
    return partial(synthesize, llm, config, turn)
