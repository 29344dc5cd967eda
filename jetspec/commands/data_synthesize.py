"""`jetspec data synthesize`: the target writes prompts, in one process or several."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from jetspec.commands.data_regenerate import Machines, load_target_alone
from jetspec.config import EngineConfig
from jetspec.data.regenerate import places, read_tokenizer
from jetspec.data.synthesize import SynthesizeConfig, UserTurn, plan, synthesize, write_prompts
from jetspec.data.workers import Answer


def synthesize_data(out: Path, count: int, config: SynthesizeConfig, machines: Machines, *, dry_run: bool) -> None:
    config.sampling("")  # refuses bad settings before anything is read
    where = places(machines.device, machines.jobs)
    engines = [engine_for(count, len(where), machines, place) for place in where]
    tokenizer, eos_tokens, _ = read_tokenizer(config.model)
    turn = UserTurn(tokenizer, eos_tokens, config.system)
    if dry_run:
        print(plan(out, count, config, turn, where))
        return
    starts = [
        partial(load_writer, config, engine, machines.dtype, place, where.count(place))
        for engine, place in zip(engines, where, strict=True)
    ]
    print(write_prompts(out, count, config, turn, starts).summary(out))


def engine_for(count: int, jobs: int, machines: Machines, place: str) -> EngineConfig:
    """Engine settings as for answers, with a batch of at most the prompts to write: more would be discarded."""
    batch = min(machines.engine(place).max_batch, -(-count // jobs))
    return replace(machines, batch=batch).engine(place)


def load_writer(config: SynthesizeConfig, engine: EngineConfig, dtype: str, device: str, sharing: int) -> Answer:
    llm = load_target_alone(config.model, engine, dtype, device, sharing)
    turn = UserTurn(llm.tokenizer, llm.target.eos_tokens, config.system)
    llm.target = replace(
        llm.target, eos_tokens=turn.end_tokens
    )  # the end of a user's turn may differ from that of an answer
    return partial(synthesize, llm, config, turn)
