"""Answers written by a server of its own, and the weights that it writes with."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from transformers import PreTrainedModel

from tasks.generation.http import JsonClient, ServerError
from tasks.generation.local import check_seeds
from tasks.generation.options import GenerationOptions
from tasks.generation.server_options import ServerOptions, find_folder_problems
from tasks.generation.stops import up_to_end, up_to_stop
from tasks.generation.writer import Written
from tasks.text.sequences import decode, start_token
from trainer import ConfigError, ModelHandle, did_you_mean, end_tokens, export_model, gather, is_main

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)
T = TypeVar("T")

# Nats between what the server and this machine say of one token; bfloat16 makes hundredths of difference.
DRIFT = 0.25


class ServerWriter:
    """Writes through a server that speaks the OpenAI-compatible completions protocol, such as vLLM's.

    Each rank sends its own prompts, as token ids and each with its seed. A trained model's weights are sent before
    what is written first after an update: as files in a shared folder, which the server is told to load again.

    Args:
        model: The model that the server is to write as.
        device: Where the ranks agree whether all went well.
        key: What the server asks for as a bearer token.
    """

    def __init__(
        self,
        model: ModelHandle,
        tokenizer: PreTrainedTokenizerBase,
        *,
        server: ServerOptions,
        device: torch.device,
        key: str | None = None,
    ) -> None:
        self.model, self.tokenizer, self.server, self.device = model, tokenizer, server, device
        self.client = JsonClient(server.url, key=key, timeout_seconds=server.timeout_seconds, retries=server.retries)
        self.ends = end_tokens(model.module, tokenizer)
        self.sent_updates: int | None = None  # the model's updates when its weights were sent
        self._refuse_what_cannot_be_sent()

    def write(
        self, prompts: Sequence[list[int]], *, seeds: Sequence[int] | None, options: GenerationOptions
    ) -> Written:
        """Returns an answer to each prompt; arguments as in `Writer.write`."""
        check_seeds(prompts, seeds)
        self.update_weights()
        asked = [index for index, prompt in enumerate(prompts) if prompt]
        bodies = [
            self._request(prompts[index], seed=None if seeds is None else seeds[index], options=options)
            for index in asked
        ]
        rows = self._together(lambda: self._ask_all(bodies, options))
        written = Written(answers=[[] for _ in prompts], is_ended=[True for _ in prompts])
        for index, (answer, is_ended) in zip(asked, rows, strict=True):
            written.answers[index], written.is_ended[index] = answer, is_ended
        return written

    def update_weights(self) -> None:
        """Has the server load the model's weights, unless it has these or the model is never trained."""
        folder, num_updates = self.server.weights_folder, self.model.num_updates
        if folder is None or num_updates == self.sent_updates:
            return
        export_model(self.model, Path(folder), tokenizer=self.tokenizer, build={})
        self._together(self._reload if is_main() else lambda: None)
        expected = self._own_likelihood()
        self._together((lambda: self._check_likelihood(expected)) if is_main() else lambda: None)
        self.sent_updates = num_updates

    def check(self, options: GenerationOptions, *, prompt: int = 1) -> None:
        """Raises ConfigError where there is no such server or model, or too few positions; every rank must call it.

        Args:
            prompt: Tokens of the longest one.
        """
        self._together(lambda: self._check_model(options, prompt))

    # What the server is asked ----------------------------------------------------------------------------------------

    def _request(self, prompt: list[int], *, seed: int | None, options: GenerationOptions) -> dict[str, Any]:
        is_drawn = seed is not None and options.temperature > 0
        body: dict[str, Any] = {
            "model": self.server.model,
            "prompt": prompt,
            "max_tokens": options.max_new_tokens,
            "n": 1,
            "temperature": options.temperature if is_drawn else 0.0,
            "top_p": options.top_p if is_drawn else 1.0,
            # What a server may otherwise take from the model's generation_config.
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
        }
        if is_drawn:
            assert seed is not None
            body["seed"] = seed % 2**31  # a number that every server's JSON can hold
        if options.stop:
            body["stop"] = list(options.stop)
        if self.server.dialect == "vllm":
            body |= {
                "top_k": options.top_k if is_drawn and options.top_k > 0 else -1,
                "min_p": options.min_p if is_drawn else 0.0,
                "repetition_penalty": 1.0,
                "stop_token_ids": sorted(self.ends),
                "include_stop_str_in_output": True,
                "return_token_ids": True,
            }
        return body

    def _ask_all(self, bodies: list[dict[str, Any]], options: GenerationOptions) -> list[tuple[list[int], bool]]:
        with ThreadPoolExecutor(self.server.connections) as pool:
            asked = [pool.submit(self.client.post, "/v1/completions", body) for body in bodies]
            try:
                return [self._read(one.result(), options) for one in asked]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)  # or all that still waits is tried first
                raise

    def _reload(self) -> None:
        try:
            said = self.client.post("/collective_rpc", {"method": "reload_weights"})
        except ServerError as error:
            raise ServerError(
                f"{error}; vLLM loads weights again only where it was started with VLLM_SERVER_DEV_MODE=1, see "
                "docs/generation.md"
            ) from None
        log.info("%s has loaded the weights of models.%s: %s", self.server.url, self.model.name, said)
        self.client.post("/reset_prefix_cache")  # what it has kept was made by other weights

    def _check_model(self, options: GenerationOptions, prompt: int) -> None:
        try:
            listed = self._field(self.client.get("/v1/models"), "data", list)
        except ServerError as error:
            raise ConfigError(
                f"task.generation.server.url={self.server.url}: {error}; start it, or mend the url"
            ) from None
        models = {str(one.get("id")): one for one in listed if isinstance(one, dict)}
        if self.server.model not in models:
            near = did_you_mean(self.server.model, models)
            raise ConfigError(
                f"task.generation.server.model: {self.server.url} has no model {self.server.model!r}, only "
                f"{', '.join(models)}{near}"
            )
        positions = models[self.server.model].get("max_model_len")
        if isinstance(positions, int) and prompt + options.max_new_tokens > positions:
            raise ConfigError(
                f"max_new_tokens={options.max_new_tokens} and a prompt of {prompt} tokens are more than the "
                f"{positions} positions of {self.server.model} at {self.server.url}; set a smaller one"
            )

    # What it says ----------------------------------------------------------------------------------------------------

    def _read(self, said: Any, options: GenerationOptions) -> tuple[list[int], bool]:
        """Returns an answer's tokens and whether it has ended by itself."""
        choice = self._choice(said)
        text, reason = self._field(choice, "text", str), choice.get("finish_reason")
        if reason not in ("stop", "length"):
            raise ServerError(f"{self.server.url} ended an answer for {reason!r}, which is neither stop nor length")
        ids = choice.get("token_ids")
        if ids is None:
            ids = [int(token) for token in self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]
        else:
            self._check_ids(ids, text)
        answer, has_end = up_to_end(ids, self.ends)
        answer, has_stop = up_to_stop(answer, options.stop, tokenizer=self.tokenizer)
        # A server leaves out the end token, but one that ended at a stop text, and left that out, says no other thing.
        is_told = isinstance(choice.get("stop_reason"), str) or (options.stop and "stop_reason" not in choice)
        end = self.tokenizer.eos_token_id
        if reason == "stop" and not (has_end or has_stop or is_told) and end is not None:
            answer.append(int(end))
        if len(answer) > options.max_new_tokens:  # told in other tokens than it was written in
            return answer[: options.max_new_tokens], False
        return answer, reason == "stop" or has_end or has_stop

    def _check_ids(self, ids: Any, text: str) -> None:
        if not (isinstance(ids, list) and all(isinstance(token, int) for token in ids)):
            raise ServerError(f"{self.server.url} gave token_ids that are no whole numbers: {str(ids)[:200]}")
        size = len(self.tokenizer)
        told = decode(self.tokenizer, [token for token in ids if token < size], skips_special=True)
        if any(not 0 <= token < size for token in ids) or not _bare(told).startswith(_bare(text)):
            raise ServerError(
                f"{self.server.model} at {self.server.url} has another vocabulary than models.{self.model.name}: it "
                f"wrote {text[:80]!r}, and its token ids say {told[:80]!r} here; serve a model of the same tokenizer"
            )

    def _choice(self, said: Any) -> Any:
        choices = self._field(said, "choices", list)
        return choices[0] if choices else None

    def _field(self, said: Any, name: str, kind: type) -> Any:
        if not isinstance(said, dict) or not isinstance(said.get(name), kind):
            raise ServerError(f"{self.server.url} answered without {name!r}: {str(said)[:200]}")
        return said[name]

    # The weights -----------------------------------------------------------------------------------------------------

    def _refuse_what_cannot_be_sent(self) -> None:
        name, folder = self.model.name, self.server.weights_folder
        if problems := find_folder_problems(self.server, name, {name: self.model.trainable}):
            raise ConfigError(*problems)
        if folder is not None and not isinstance(self.model.module, PreTrainedModel):
            raise ConfigError(
                f"task.generation.server: the weights of models.{name} cannot be sent, as it is no transformers model "
                "of its own (adapters are written apart); train it whole, or set task.generation.server=null"
            )

    @torch.no_grad()
    def _own_likelihood(self) -> float:
        """Returns the model's largest log-probability after a short text, in nats; every rank must call it."""
        with self.model.evaluating():
            ids = torch.tensor([self._short_text()], device=self.device)
            scores = self.model(input_ids=ids).logits[0, -1].float()
        return float(scores.log_softmax(-1).max())

    def _check_likelihood(self, expected: float) -> None:
        """Raises ServerError where the server gives the most likely token another probability than the model does."""
        body = self._request(self._short_text(), seed=None, options=GenerationOptions(max_new_tokens=1))
        told = self._choice(self.client.post("/v1/completions", body | {"logprobs": 1}))
        values = self._field(self._field(told, "logprobs", dict), "token_logprobs", list)
        found = float(values[0]) if values and isinstance(values[0], int | float) else math.nan
        if not abs(found - expected) <= DRIFT:
            raise ServerError(
                f"{self.server.model} at {self.server.url} does not write with the weights of "
                f"{self.server.weights_folder}: it finds its most likely token at {found:.3f} nats, and "
                f"models.{self.model.name} at {expected:.3f}; serve the model from that folder"
            )

    def _short_text(self) -> list[int]:
        return [start_token(self.tokenizer), *self.tokenizer("The", add_special_tokens=False)["input_ids"]]

    def _together(self, ask: Callable[[], T]) -> T:
        """Returns what this rank was told, or raises on every rank where one was not told."""
        problem: Exception | None = None
        try:
            found = ask()
        except Exception as error:
            problem = error
        told = [text for text in gather(None if problem is None else str(problem)) if text is not None]
        if problem is not None:
            raise problem
        if told:
            raise ServerError(f"another rank failed: {told[0]}")
        return found


def _bare(text: str) -> str:
    """Returns a text without spaces and halves of characters, which decoders treat each in its own way."""
    return "".join(text.replace("\N{REPLACEMENT CHARACTER}", "").split())
