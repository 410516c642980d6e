"""A real HTTP server that speaks the OpenAI-compatible completions protocol, as vLLM does, on a tiny model."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


class LocalServer(ThreadingHTTPServer):
    """Serves a model; a test may have it fail, or answer in other ways.

    Args:
        gives_ids: Whether it gives token ids where they are asked for.
        is_standard: Whether it refuses what only vLLM knows.
    """

    daemon_threads = True

    def __init__(self, model: Any, tokenizer: Any, *, gives_ids: bool = True, is_standard: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.model, self.tokenizer, self.gives_ids, self.is_standard = model.eval(), tokenizer, gives_ids, is_standard
        self.folder: Path | None = None  # where it was started from, and loads again from
        self.faults: list[str] = []  # what the next requests meet: a status, "slow", "cut" or "broken"
        self.seen: list[tuple[str, Any, str | None]] = []  # path, body and key of every request
        self.busiest = 0
        self._busy = 0
        self._lock, self._turn = threading.Lock(), threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def paths(self) -> list[str]:
        return [path for path, _, _ in self.seen]

    @contextmanager
    def counted(self) -> Iterator[None]:
        with self._lock:
            self._busy += 1
            self.busiest = max(self.busiest, self._busy)
        try:
            yield
        finally:
            with self._lock:
                self._busy -= 1

    @torch.no_grad()
    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """One answer, token by token, drawn by torch from the seed of the request."""
        draw = torch.Generator().manual_seed(body.get("seed", 0))
        ids, likelihoods, reason, stop_reason = [], [], "length", None
        while len(ids) < body["max_tokens"]:
            with self._turn:
                scores = self.model(torch.tensor([body["prompt"] + ids])).logits[0, -1]
            drawn = scores / body["temperature"] if body["temperature"] > 0 else scores
            is_greedy = body["temperature"] == 0
            token = int(drawn.argmax() if is_greedy else torch.multinomial(drawn.softmax(-1), 1, generator=draw))
            ids.append(token)
            likelihoods.append(float(scores.log_softmax(-1)[token]))
            text = self.tokenizer.decode(ids, skip_special_tokens=True)
            stops = [stop for stop in body.get("stop", []) if stop in text]
            if token == self.tokenizer.eos_token_id or token in body.get("stop_token_ids", []) or stops:
                reason, stop_reason = "stop", (stops or [None])[0]
                break
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        if stop_reason is not None:
            before, _, _ = text.partition(stop_reason)
            text = before + stop_reason * bool(body.get("include_stop_str_in_output"))
        choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": reason}
        if not self.is_standard:
            choice["stop_reason"] = stop_reason
        if body.get("return_token_ids") and self.gives_ids:
            choice["token_ids"] = ids
        if body.get("logprobs"):
            choice["logprobs"] = {"token_logprobs": likelihoods}
        return {"object": "text_completion", "model": body["model"], "choices": [choice]}


class _Handler(BaseHTTPRequestHandler):
    server: LocalServer

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, body: Any) -> None:
        server = self.server
        server.seen.append((self.path, body, self.headers.get("Authorization")))
        with server.counted():
            fault = server.faults.pop(0) if server.faults else None
            if fault == "slow":
                time.sleep(0.7)
            status, said = (int(fault), self._excuse(fault)) if fault and fault.isdigit() else self._route(body)
            data = json.dumps(said).encode()
            data = data[: len(data) // 2] if fault == "cut" else data
            try:
                self.send_response(status)
                self.send_header("Content-Length", str(len(data) + (5 if fault == "broken" else 0)))
                self.end_headers()
                self.wfile.write(data)
            except BrokenPipeError:
                pass  # it was too slow

    def _excuse(self, status: str) -> Any:
        return {"error": {"message": f"the engine is ill ({status})", "key": self.headers.get("Authorization")}}

    def _route(self, body: Any) -> tuple[int, Any]:
        server = self.server
        if self.path == "/v1/models":
            return 200, {"object": "list", "data": [{"id": "tiny", "max_model_len": 64}]}
        if self.path == "/v1/completions":
            unknown = {"top_k", "min_p", "repetition_penalty", "stop_token_ids", "return_token_ids"} & set(body)
            if server.is_standard and unknown:
                return 400, {"error": {"message": f"unknown fields {sorted(unknown)}"}}
            return 200, server.complete(body)
        if self.path == "/collective_rpc" and body["method"] == "reload_weights":
            if server.folder is not None:
                assert (server.folder / "config.json").is_file()
                server.model.load_state_dict(load_file(server.folder / "model.safetensors"))
            return 200, {"results": [None]}
        if self.path == "/reset_prefix_cache":
            return 200, None
        return 404, {"detail": "Not Found"}


@contextmanager
def serving(model: Any, tokenizer: Any, **options: Any) -> Iterator[LocalServer]:
    server = LocalServer(model, tokenizer, **options)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
