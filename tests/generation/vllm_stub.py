"""A stand-in for `vllm serve` that speaks its protocol, as recorded from vLLM 0.32, and samples from a real tiny model.

It receives weights over gloo like a real worker, so a test sees whether an update changed what is sampled. What goes
wrong on request: errors, replies with holes, slow answers, dropped connections, a death and a return.
"""

from __future__ import annotations

import copy
import json
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random
from typing import Any
from urllib.parse import urlsplit

import torch
from peft import PeftModel
from torch.distributed import PrefixStore, TCPStore

from agentrl.generation.gloo import broadcast, join
from agentrl.generation.sampling import draw, process_logits

ROUTES = [
    "/health",
    "/v1/models",
    "/v1/completions",
    "/server_info",
    "/get_world_size",
    "/weight_info",
    "/pause",
    "/resume",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/reset_prefix_cache",
]
DROP = object()
"""A fault: hang up without an answer."""


class StubServer:
    """A server in this process.

    Args:
        model: What it serves, copied.
        max_model_len: The context that it states.
        raw: Report logprobs of the model's own distribution, as vLLM does by default.
        generates: Offer `/inference/v1/generate`.
        lora: Offer adapters, up to this rank.
        parallel: What it says about its engines.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_model_len: int = 256,
        raw: bool = False,
        generates: bool = False,
        lora: int = 0,
        parallel: dict[str, Any] | None = None,
    ) -> None:
        self.first = copy.deepcopy(model)
        self.model = copy.deepcopy(model)
        self.max_model_len, self.raw, self.generates, self.lora = max_model_len, raw, generates, lora
        self.backend = "gloo"
        self.dtype = "torch.float32"
        self.normalizes = True
        self.version = "default"
        self.adapter: str | None = None
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.parallel = parallel or {}
        self.engines_asked: list[str | None] = []
        self.faults: dict[str, deque[Any]] = {}
        self.delay: Callable[[dict[str, Any]], float] = lambda body: 0.0
        self.stale = False
        self._lock = threading.Lock()
        self._group: Any = None
        self._received: list[tuple[str, torch.Tensor]] = []
        self._active = False
        self.port, self.life = 0, 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Come up, after a death with the weights of the beginning."""
        self.model, self.version, self._group, self._active = copy.deepcopy(self.first), "default", None, False
        self.adapter = None
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                stub._handle(self)

            def do_POST(self) -> None:
                stub._handle(self)

            def log_message(self, *args: Any) -> None:
                pass

        self.alive, self.life = True, self.life + 1
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=lambda: self._server.serve_forever(0.02), daemon=True)
        self._thread.start()

    def die(self) -> None:
        """Be killed: nobody is answered any more, not even those who wait."""
        self.alive = False
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    close = die

    def fail(self, path: str, *faults: Any) -> None:
        """Let the next calls of a route go wrong: DROP, (status, text) or a JSON reply."""
        self.faults.setdefault(path, deque()).extend(faults)

    def bodies(self, path: str) -> list[dict[str, Any]]:
        """What was sent to a route."""
        return [body for where, body in self.requests if where == path]

    # ------------------------------------------------------------------------------------------------------

    def _handle(self, handler: BaseHTTPRequestHandler) -> None:
        path, life = urlsplit(handler.path).path, self.life
        body = json.loads(handler.rfile.read(int(handler.headers.get("content-length") or 0)) or "{}")
        self.requests.append((path, body))
        if path in ("/v1/completions", "/inference/v1/generate"):
            self.engines_asked.append(handler.headers.get("X-data-parallel-rank"))
        waiting = self.faults.get(path)
        fault = waiting.popleft() if waiting else None
        if fault is DROP:
            handler.close_connection = True
            return
        try:
            if isinstance(fault, tuple):
                status, answer = fault[0], {"error": {"message": fault[1], "code": fault[0]}}
            else:
                status, answer = (200, fault) if fault is not None else self._answer(path, body)
        except Exception as error:
            text = f"Call to collective_rpc method failed: Worker failed with error '{error}'"
            status, answer = 500, {"error": {"message": text, "type": "InternalServerError", "code": 500}}
        if not self.alive or life != self.life:
            handler.close_connection = True
            return
        content = b"" if answer is None else json.dumps(answer).encode()
        try:
            handler.send_response(status)
            handler.send_header("content-length", str(len(content)))
            handler.send_header("content-type", "application/json")
            handler.end_headers()
            handler.wfile.write(content)
        except OSError:
            pass  # the caller has hung up

    def _answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/health":
            return 200, None
        if path == "/v1/models":
            return 200, {"object": "list", "data": [{"id": "tiny", "max_model_len": self.max_model_len}]}
        if path == "/openapi.json":
            extra = ["/inference/v1/generate"] * self.generates + ["/v1/load_lora_adapter"] * bool(self.lora)
            return 200, {"paths": {route: {} for route in [*ROUTES, *extra]}}
        if path == "/server_info":
            lora = {"max_lora_rank": self.lora} if self.lora else None
            config = {"weight_transfer_config": {"backend": self.backend}, "lora_config": lora}
            images = {"multimodal_config": {"mm_device_do_normalize": self.normalizes}}
            model = {"dtype": self.dtype, **images}
            return 200, {"vllm_config": {**config, "model_config": model, "parallel_config": self.parallel}}
        if path == "/weight_info":
            return 200, {"weight_version": self.version}
        if path == "/get_world_size":
            return 200, {"world_size": 1}
        if path in ("/v1/completions", "/inference/v1/generate"):
            return self._sample(path, body)
        return self._weights(path, body)

    def _weights(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/load_lora_adapter":
            adapted = PeftModel.from_pretrained(copy.deepcopy(self.first), body["lora_path"])
            with self._lock:
                self.model, self.adapter = adapted.merge_and_unload(), body["lora_name"]
            return 200, "Success: the adapter was added."
        if path == "/update_weight_version":
            self.version = body["new_version"]
            return 200, {"success": True, "new_version": self.version}
        if path == "/init_weight_transfer_engine":
            info = body["init_info"]
            store = TCPStore(
                info["master_address"], info["master_port"], is_master=False, timeout=timedelta(seconds=info["timeout"])
            )
            self._group = join(PrefixStore(info["meeting"], store), 1, info["world_size"], info["timeout"])
        elif path == "/start_weight_update":
            if self._active:
                raise RuntimeError("start_weight_update called while a weight update is already active.")
            self._active, self._received = True, []
        elif path == "/update_weights":
            self._active, update = False, body["update_info"]
            for name, dtype, shape in zip(update["names"], update["dtype_names"], update["shapes"], strict=True):
                tensor = torch.empty(shape, dtype=getattr(torch, dtype))
                broadcast(self._group, tensor)
                self._received.append((name, tensor))
            self._active = True
        elif path == "/finish_weight_update":
            if not self._active:
                raise RuntimeError("finish_weight_update called without a matching start_weight_update.")
            self._active = False
            with self._lock:
                mine = dict(self.model.named_parameters())
                for name, tensor in [] if self.stale else self._received:
                    if name not in mine:
                        raise ValueError(f"There is no module or parameter named {name!r}")
                    mine[name].data.copy_(tensor)
            self.version = body.get("weight_version", self.version)
        return 200, {"message": "done"}

    def _sample(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        fields = body.get("sampling_params", body)
        prompt = body.get("prompt", body.get("token_ids"))
        time.sleep(self.delay(body))
        if len(prompt) + fields["max_tokens"] > self.max_model_len:
            text = f"max_tokens={fields['max_tokens']} cannot be greater than max_model_len={self.max_model_len}."
            return 400, {"error": {"message": text, "type": "BadRequestError", "code": 400}}
        if body["model"] not in ("tiny", self.adapter):
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist.", "code": 404}}
        with self._lock:
            ids, logprobs = self._draw(prompt, fields)
        stopped = ids[-1] in fields["stop_token_ids"]
        choice = {"index": 0, "finish_reason": "stop" if stopped else "length", "token_ids": ids}
        if path == "/v1/completions":
            choice |= {"logprobs": {"token_logprobs": logprobs}, "prompt_token_ids": prompt, "text": ""}
        else:
            content = [{"token_id": i, "logprob": p, "rank": 1} for i, p in zip(ids, logprobs, strict=True)]
            spans = [{"version": self.version, "start": 0, "end": len(ids)}]
            choice |= {"logprobs": {"content": content}, "weight_versions": spans}
        return 200, {"choices": [choice], "usage": {"completion_tokens": len(ids)}}

    @torch.no_grad()
    def _draw(self, prompt: list[int], fields: dict[str, Any]) -> tuple[list[int], list[float]]:
        uniforms, ids, logprobs = Random(fields["seed"]), [], []
        while len(ids) < fields["max_tokens"] and not (ids and ids[-1] in fields["stop_token_ids"]):
            row = torch.tensor([*prompt, *ids])
            logits_1V = self.model(input_ids=row[None]).logits[:, -1].float()
            seen_1V = torch.zeros_like(logits_1V, dtype=torch.bool)
            seen_1V[0, row] = True
            logps_1V = process_logits(
                logits_1V,
                temperature=fields["temperature"],
                top_k=fields["top_k"],
                top_p=fields["top_p"],
                min_p=fields["min_p"] or None,
                repetition_penalty=fields["repetition_penalty"],
                seen_NV=seen_1V,
            )
            token = int(draw(logps_1V, [uniforms.random()]))
            reported = logits_1V.log_softmax(-1) if self.raw else logps_1V
            ids.append(token)
            logprobs.append(float(reported[0, token]))
        return ids, logprobs
