"""The routes. They translate between HTTP and tickets; nothing is decoded here."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

import jetspec
from jetspec.engine.llm import LLM
from jetspec.serve.answer import DONE, Answer, ChatAnswer, Chunk, TextAnswer, Vocabulary, event
from jetspec.serve.body import JsonRoute
from jetspec.serve.compiler import Compiler
from jetspec.serve.config import ServeConfig
from jetspec.serve.errors import ApiError, add_handlers, gone, note, stopping
from jetspec.serve.guard import Guard
from jetspec.serve.log import facts
from jetspec.serve.metrics import Metrics
from jetspec.serve.prepare import Prepared, RequestBuilder
from jetspec.serve.protocol import (
    ChatChunk,
    ChatCompletion,
    ChatRequest,
    CompletionRequest,
    ErrorAnswer,
    Generation,
    Health,
    ModelCard,
    ModelList,
    TextCompletion,
    TreeShape,
)
from jetspec.serve.stream import EventStream, watched
from jetspec.serve.worker import EngineThread, RequestHandle

STATIC = Path(__file__).parent / "static"
PAGE_POLICY = "; ".join(
    (
        "default-src 'none'",
        *(f"{kind}-src 'self'" for kind in ("script", "style", "img", "connect")),
        *(f"{kind} 'none'" for kind in ("base-uri", "form-action", "frame-ancestors")),
    )
)
"""The page may load what this server has, and nothing else: no script or style of the page's own text."""
PREPARERS = 2
"""Threads that make token ids of requests, so that a long prompt does not keep everybody waiting."""
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer, "description": text}
    for status, text in {
        400: "The request is wrong, or asks for what is not supported; the message names it.",
        401: "The API key is missing or wrong.",
        404: "There is no such model.",
        408: "The request did not arrive in time.",
        413: "The request is too large.",
        415: "The body is compressed, or in another charset than UTF-8.",
        417: "The request expects what the server does not do.",
        429: "The queue is full; Retry-After says when to come back.",
        500: "The engine has failed.",
        503: "The server is shutting down, or reads the schemas of others; Retry-After says when to come back.",
    }.items()
}


def may_stream(chunk: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """How a route answers that sends these chunks when asked to stream."""
    schema = {"$ref": f"#/components/schemas/{chunk.__name__}"}
    return {200: {"content": {"text/event-stream": {"schema": schema}}}, **REFUSALS}


def with_chunks(document: dict[str, Any]) -> dict[str, Any]:
    """The OpenAPI document with the schema of chunks, which no route returns as its whole body."""
    schema = ChatChunk.model_json_schema(ref_template="#/components/schemas/{model}", mode="serialization")
    document["components"]["schemas"] |= {**schema.pop("$defs"), "ChatChunk": schema}
    return document


class Server:
    """The application over one LLM: its engine thread, its metrics, its routes."""

    def __init__(self, llm: LLM, config: ServeConfig) -> None:
        self.config = config
        self.model_name = config.model_name or llm.model_name
        self.created = int(time.time())
        self.words = Vocabulary(llm.tokenizer)
        self.metrics = Metrics(llm.engine, self.model_name)
        self.compiler = Compiler(llm)
        self.writer = ThreadPoolExecutor(1, "write")
        self.worker = EngineThread(llm.engine, self.metrics, llm.config.max_batch, config.max_queue)
        self.builder = RequestBuilder(
            llm.tokenizer,
            llm.tree,
            model_name=self.model_name,
            max_len=llm.engine.max_len,
            max_prompt=config.max_prompt,
            max_tokens=config.max_tokens,
        )
        self.shape = TreeShape(
            drafter=llm.drafter,
            budget=llm.tree.budget,
            width=llm.tree.width,
            max_len=llm.engine.max_len,
            max_tokens=self.builder.max_tokens,
        )

    def app(self) -> ASGIApp:
        app = FastAPI(
            title="JetSpec",
            version=jetspec.__version__,
            description="Tree-speculative decoding behind OpenAI's API.",
            lifespan=self._lifespan,
            docs_url=None,
            redoc_url=None,
        )
        add_handlers(app)
        app.router.route_class = JsonRoute
        self._add_api(app)
        self._add_operations(app)
        app.openapi = lambda: with_chunks(type(app).openapi(app))  # type: ignore[method-assign]
        return Guard(app, self.config, self.metrics.answered)

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(PREPARERS, "prepare"))
        self.worker.start()
        yield
        self.worker.refuse_all(stopping())
        await asyncio.to_thread(self.worker.stop)
        self.compiler.stop()
        self.writer.shutdown(wait=False, cancel_futures=True)

    def _add_api(self, app: FastAPI) -> None:
        @app.post("/v1/chat/completions", response_model=ChatCompletion, responses=may_stream(ChatChunk))
        async def chat(asked: ChatRequest, request: Request) -> Response:
            """Answer a conversation. With `stream`, chunks come as server-sent events, one per round."""
            return await self._answer(asked, request, self.builder.chat, ChatAnswer)

        @app.post("/v1/completions", response_model=TextCompletion, responses=may_stream(TextCompletion))
        async def complete(asked: CompletionRequest, request: Request) -> Response:
            """Go on with a text. With `stream`, chunks come as server-sent events, one per round."""
            return await self._answer(asked, request, self.builder.completion, TextAnswer)

        @app.get("/v1/models", responses=REFUSALS)
        async def models() -> ModelList:
            return ModelList(data=[self._card()])

        @app.get("/v1/models/{name:path}", responses=REFUSALS)
        async def model(name: str) -> ModelCard:
            if name != self.model_name:
                raise ApiError("there is no such model here", status=404, code="model_not_found")
            return self._card()

    def _add_operations(self, app: FastAPI) -> None:
        @app.get("/health", responses={503: {"model": Health}})
        async def health() -> Response:
            """Whether the engine lives."""
            return _state("failed", 503) if self.worker.failure else _state("ok")

        @app.get("/ready", responses={503: {"model": Health}})
        async def ready() -> Response:
            """Whether another request would be taken."""
            if self.worker.is_ready:
                return _state("ready")
            dead = self.worker.failure is not None
            return _state("failed" if dead else "stopping" if self.worker.is_stopping else "busy", 503)

        @app.get("/metrics", response_class=Response)
        async def metrics() -> Response:
            """Counters for Prometheus."""
            return Response(self.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

        if (STATIC / "index.html").exists():
            app.mount("/static", StaticFiles(directory=STATIC))

            @app.get("/", include_in_schema=False)
            async def playground() -> Response:
                return FileResponse(STATIC / "index.html", headers={"Content-Security-Policy": PAGE_POLICY})

    def _card(self) -> ModelCard:
        return ModelCard(id=self.model_name, created=self.created, jetspec=self.shape)

    async def _answer(
        self,
        asked: Generation,
        request: Request,
        prepare: Callable[[Any, str], Prepared],
        make_answer: Callable[..., Answer],
    ) -> Response:
        said = facts.get()
        if asked.user:
            said["user"] = asked.user
        if self.config.log_text:
            said["asked"] = asked.model_dump(exclude_unset=True)
        prepared = await asyncio.to_thread(prepare, asked, said.get("tenant", ""))
        if prepared.grammar is not None:
            param = "tools" if prepared.reads_tools else "response_format"
            client = said.get("tenant") or (request.client.host if request.client else "")
            prepared = prepared.with_grammar(await self.compiler.compile(prepared.grammar, param, client))
        answer = make_answer(prepared, self.words, self.model_name)
        handle = self.worker.submit(prepared.jobs)
        try:
            async with watched(request.receive, handle):
                await asyncio.wait([handle.joined])
            if handle.joined.cancelled():
                raise gone()
            handle.joined.result()
        except BaseException:
            self.worker.close(handle)
            raise
        if asked.stream:
            has_bill = asked.stream_options is not None and asked.stream_options.include_usage
            events = self._events(handle, answer, has_bill)
            close = partial(self._close, handle, answer, said)
            return EventStream(events, handle, close)
        return await self._collect(request, handle, answer, said)

    async def _collect(self, request: Request, handle: RequestHandle, answer: Answer, said: dict[str, Any]) -> Response:
        try:
            async with watched(request.receive, handle):
                async for index, update in handle.updates():
                    answer.keep(index, update)
        finally:
            self._close(handle, answer, said)
        if len(answer.completions) < handle.num_answers:
            raise gone()
        # With log-probabilities it can be long.
        writing = asyncio.get_running_loop().run_in_executor(self.writer, lambda: answer.whole().model_dump_json())
        return Response(await writing, media_type="application/json")

    async def _events(self, handle: RequestHandle, answer: Answer, has_bill: bool) -> AsyncGenerator[bytes]:
        try:
            async for index, update in handle.updates():
                if chunk := answer.take(index, update):
                    yield _event(chunk)
            if has_bill and len(answer.completions) == handle.num_answers:
                yield _event(answer.bill())
            yield DONE
        except ApiError as why:
            note(why)
            yield event(json.dumps(why.body()))

    def _close(self, handle: RequestHandle, answer: Answer, said: dict[str, Any]) -> None:
        self.worker.close(handle)
        said["answers"] = f"{len(answer.completions)} of {handle.num_answers}"
        said["prompt_tokens"] = sum(len(job.tokens) for job in handle.jobs)
        said["completion_tokens"], said["rounds"] = handle.num_tokens, handle.num_rounds
        if self.config.log_text:
            said["answered"] = [done.text for done in answer.completions.values()]


def _event(chunk: Chunk) -> bytes:
    """All ASCII: some readers of lines take characters such as U+2028 for the end of one."""
    return event(chunk.model_dump_json(ensure_ascii=True))


def _state(status: str, code: int = 200) -> Response:
    return JSONResponse({"status": status}, code)
