"""Routes of the server. To add an endpoint: add a function to `_add_api` (OpenAI's API) or `_add_operations` (health,
metrics, page), and its request and response schemas to `protocol`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

import jetspec
from jetspec.engine.llm import LLM
from jetspec.serve import protocol as api
from jetspec.serve.builder import RequestBuilder
from jetspec.serve.compiler import Compiler
from jetspec.serve.config import ServeConfig
from jetspec.serve.errors import ApiError, add_handlers, client_disconnected, shutting_down
from jetspec.serve.log import request_fields
from jetspec.serve.metrics import Metrics
from jetspec.serve.middleware import JsonRoute, Middleware
from jetspec.serve.response import AnyResponse, ChatResponse, TextResponse, Vocabulary
from jetspec.serve.worker import EngineThread, Job, RequestHandle

STATIC = Path(__file__).parent / "static"
PAGE_POLICY = "; ".join(
    (
        "default-src 'none'",
        *(f"{kind}-src 'self'" for kind in ("script", "style", "img", "connect")),
        *(f"{kind} 'none'" for kind in ("base-uri", "form-action", "frame-ancestors")),
    )
)
"""Content security policy of the page: only files of this server, no inline scripts or styles."""
PREPARE_THREADS = 2
"""Threads that tokenize requests; with one, a long prompt would delay all others."""
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": api.ErrorResponse, "description": text}
    for status, text in {
        400: "The request is invalid or not supported; the message names the field.",
        401: "The API key is missing or wrong.",
        404: "The model does not exist.",
        408: "The request did not arrive in time.",
        413: "The request is too large.",
        415: "The body is compressed, or not in UTF-8.",
        417: "The expectation is not supported.",
        429: "The queue is full; Retry-After says when to try again.",
        500: "The engine has failed.",
        503: "The server shuts down, or compiles other schemas; Retry-After says when to try again.",
    }.items()
}


def streaming_responses(chunk: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """OpenAPI responses of a route that can stream these chunks."""
    schema = {"$ref": f"#/components/schemas/{chunk.__name__}"}
    return {200: {"content": {"text/event-stream": {"schema": schema}}}, **ERRORS}


def add_chunk_schema(document: dict[str, Any]) -> dict[str, Any]:
    """Adds the schema of chat chunks to the OpenAPI document; no route has them as its whole body."""
    schema = api.ChatChunk.model_json_schema(ref_template="#/components/schemas/{model}", mode="serialization")
    document["components"]["schemas"] |= {**schema.pop("$defs"), "ChatChunk": schema}
    return document


class Server:
    """The ASGI application over one LLM, with its engine thread and metrics."""

    def __init__(self, llm: LLM, config: ServeConfig) -> None:
        self.llm, self.config = llm, config
        self.builder = RequestBuilder(llm, config)
        self.model_name = self.builder.model_name
        shape = api.TreeShape(
            drafter=llm.drafter,
            budget=llm.tree.budget,
            width=llm.tree.width,
            max_len=llm.engine.max_len,
            max_tokens=self.builder.max_tokens,
        )
        self.card = api.ModelCard(id=self.model_name, created=int(time.time()), jetspec=shape)
        self.vocab = Vocabulary(llm.tokenizer)
        self.metrics = Metrics(llm.engine, self.model_name)
        self.compiler = Compiler(llm)
        self.serializer = ThreadPoolExecutor(1, "serialize")
        self.worker = EngineThread(llm.engine, self.metrics, llm.config.max_batch, config.max_queue)

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
        app.openapi = lambda: add_chunk_schema(type(app).openapi(app))  # type: ignore[method-assign]
        return Middleware(app, self.config, self.metrics.on_response)

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(PREPARE_THREADS, "prepare"))
        self.worker.start()
        yield
        self.worker.abort_all(shutting_down())
        await asyncio.to_thread(self.worker.stop)
        self.compiler.stop()
        self.serializer.shutdown(wait=False, cancel_futures=True)

    def _add_api(self, app: FastAPI) -> None:
        @app.post(
            "/v1/chat/completions", response_model=api.ChatCompletion, responses=streaming_responses(api.ChatChunk)
        )
        async def chat(body: api.ChatRequest, request: Request) -> Response:
            """Complete a conversation. With `stream`, chunks are server-sent events, one per round."""
            return await self._generate(body, request, self.builder.chat, ChatResponse)

        @app.post(
            "/v1/completions", response_model=api.TextCompletion, responses=streaming_responses(api.TextCompletion)
        )
        async def complete(body: api.CompletionRequest, request: Request) -> Response:
            """Complete a text. With `stream`, chunks are server-sent events, one per round."""
            return await self._generate(body, request, self.builder.completion, TextResponse)

        @app.get("/v1/models", responses=ERRORS)
        async def models() -> api.ModelList:
            return api.ModelList(data=[self.card])

        @app.get("/v1/models/{name:path}", responses=ERRORS)
        async def model(name: str) -> api.ModelCard:
            if name != self.model_name:
                raise ApiError("there is no such model here", status=404, code="model_not_found")
            return self.card

    def _add_operations(self, app: FastAPI) -> None:
        @app.get("/health", responses={503: {"model": api.Health}})
        async def health() -> Response:
            """Status 200 while the engine works."""
            return _status("failed", 503) if self.worker.failure else _status("ok")

        @app.get("/ready", responses={503: {"model": api.Health}})
        async def ready() -> Response:
            """Status 200 while another request would be accepted."""
            if self.worker.is_ready:
                return _status("ready")
            has_failed = self.worker.failure is not None
            return _status("failed" if has_failed else "stopping" if self.worker.is_stopping else "busy", 503)

        @app.get("/metrics", response_class=Response)
        async def metrics() -> Response:
            """Metrics for Prometheus."""
            return Response(self.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

        if (STATIC / "index.html").exists():
            app.mount("/static", StaticFiles(directory=STATIC))

            @app.get("/", include_in_schema=False)
            async def playground() -> Response:
                return FileResponse(STATIC / "index.html", headers={"Content-Security-Policy": PAGE_POLICY})

    async def _generate(
        self,
        body: api.GenerationRequest,
        request: Request,
        prepare: Callable[[Any, str], Job],
        make_response: Callable[[Job, Vocabulary, str], AnyResponse],
    ) -> Response:
        fields = request_fields.get()
        if body.user:
            fields["user"] = body.user
        if self.config.log_text:
            fields["asked"] = body.model_dump(exclude_unset=True)
        job = await asyncio.to_thread(prepare, body, fields.get("tenant", ""))
        if job.sampling.grammar is not None:
            param = "tools" if job.reads_tools else "response_format"
            client = fields.get("tenant") or (request.client.host if request.client else "")
            grammar = await self.compiler.compile(job.sampling.grammar, param, client)
            job = replace(job, sampling=replace(job.sampling, grammar=grammar))
        response = make_response(job, self.vocab, self.model_name)
        handle = self.worker.submit(job)
        try:
            async with cancel_on_disconnect(request.receive, handle):
                await handle.wait_admitted()
        except BaseException:
            handle.close()
            raise
        if body.stream:
            has_usage = body.stream_options is not None and body.stream_options.include_usage
            events = self._events(handle, response, has_usage)
            return EventStream(events, partial(self._close, handle, response, fields))
        return await self._collect(request, handle, response, fields)

    async def _collect(
        self, request: Request, handle: RequestHandle, response: AnyResponse, fields: dict[str, Any]
    ) -> Response:
        try:
            async with cancel_on_disconnect(request.receive, handle):
                async for index, update in handle.updates():
                    response.add(index, update)
        finally:
            self._close(handle, response, fields)
        if len(response.completions) < handle.job.num_completions:
            raise client_disconnected()
        # In a thread: with log-probabilities a response can have megabytes.
        loop = asyncio.get_running_loop()
        content = await loop.run_in_executor(self.serializer, lambda: response.whole().model_dump_json())
        return Response(content, media_type="application/json")

    async def _events(self, handle: RequestHandle, response: AnyResponse, has_usage: bool) -> AsyncGenerator[bytes]:
        # Chunks are ASCII only: some line readers take characters such as U+2028 for line breaks.
        try:
            async for index, update in handle.updates():
                if chunk := response.chunk(index, update):
                    yield event(chunk.model_dump_json(ensure_ascii=True))
            if has_usage and len(response.completions) == handle.job.num_completions:
                yield event(response.usage_chunk().model_dump_json(ensure_ascii=True))
            yield event("[DONE]")
        except ApiError as error:
            error.log()
            yield event(json.dumps(error.body()))

    def _close(self, handle: RequestHandle, response: AnyResponse, fields: dict[str, Any]) -> None:
        """Release a request and complete its log line."""
        handle.close()
        fields["answers"] = f"{len(response.completions)} of {handle.job.num_completions}"
        fields["prompt_tokens"], fields["sampling"] = handle.job.prompt_tokens, handle.job.sampling.setting
        fields["completion_tokens"], fields["rounds"] = handle.num_tokens, handle.num_rounds
        if self.config.log_text:
            fields["answered"] = [done.text for done in response.completions.values()]


class EventStream(StreamingResponse):
    """Server-sent events. A client that disconnects or is cut off ends them; `close` is always called."""

    def __init__(self, events: AsyncGenerator[bytes], close: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self.close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.close()


def event(data: str) -> bytes:
    """One server-sent event. JSON text has no line breaks."""
    return f"data: {data}\n\n".encode()


@asynccontextmanager
async def cancel_on_disconnect(receive: Receive, handle: RequestHandle) -> AsyncIterator[None]:
    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        handle.close()

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()


def _status(status: str, code: int = 200) -> Response:
    return JSONResponse({"status": status}, code)
