"""`edgespec serve`: the OpenAI-compatible server over one engine, and its page.

settings      what the server is told, checked before anything is loaded
app           the endpoints (FastAPI), put together from the parts below
guard         who may ask: Host and Origin, CORS, key, draining; the first to see a request, counts those under way
body, schemas a request's bytes (bounded, also of all together) -> JSON -> a checked `Ask`
answering     an `Ask` -> the engine's `Request`, cancelled when its client leaves
openai, sse   results in OpenAI's shapes, whole or as server-sent events
connections   how many connections, and how long a client may stay silent or refuse to read (uvicorn's protocol)
lifecycle     signals, grace, the end
metrics, timeline  what is counted for Prometheus; what the page draws
"""
