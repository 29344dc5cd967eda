"""OpenAI-compatible HTTP server over one `LLM`.

A request passes these modules in order:

- `run`: socket, uvicorn, signals, shutdown; `connection`: timeouts and limits of one connection
- `middleware`: API keys, limits of a request, request ids, JSON bodies
- `app`: routes (add an endpoint here)
- `protocol`: request and response schemas; `builder`: a request becomes engine jobs; `compiler`: its grammar
- `worker`: the thread that runs the engine
- `response`: engine updates become a response or the chunks of a stream; `tools`: tool calls in the text
- `metrics`: Prometheus metrics (add a metric here); `log`, `errors`: log lines and API errors

`config` holds the settings, `static/` the page at the root of the server.
"""
