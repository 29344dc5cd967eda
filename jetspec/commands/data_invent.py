"""`jetspec data invent`: the engine as what writes prompts, in one process or several."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from jetspec.commands.data_regenerate import Machines, load_target_alone
from jetspec.config import EngineConfig
from jetspec.data.invent import InventConfig, UserTurn, invent, plan, write_prompts
from jetspec.data.regenerate import places, read_tokenizer
from jetspec.data.workers import Answer


def invent_data(out: Path, count: int, config: InventConfig, machines: Machines, *, dry_run: bool) -> None:
    config.sampling("")  # a bad setting is refused before anything is read
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
    """As for answers, but with no more under way than are wanted: the rest would be thrown away."""
    batch = min(machines.engine(place).max_batch, -(-count // jobs))
    return replace(machines, batch=batch).engine(place)


def load_writer(config: InventConfig, engine: EngineConfig, dtype: str, device: str, sharing: int) -> Answer:
    llm = load_target_alone(config.model, engine, dtype, device, sharing)
    turn = UserTurn(llm.tokenizer, llm.target.eos_tokens, config.system)
    llm.target = replace(llm.target, eos_tokens=turn.end_tokens)  # a user's turn may end otherwise than an answer
    return partial(invent, llm, config, turn)
