"""Tiny models whose ends of a text are read anew since cb5a1ef, and jobs that it began: tests/journal/cb5a1ef.journal
and .json.

Broker, verifiers and journal are the real ones, in one process and without sockets. The texts in the .json are those of
cb5a1ef, from the first token to the last. The journal is of a second run, which stopped in the middle of them. Both
files were made with the code of commit cb5a1ef by what this file was in commit 2b162de, which says how.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from specq.broker import Broker, Effect, Find, Send, Write
from specq.engines.torch.engine import TorchEngine
from specq.journal import Opening, open_journal
from specq.protocol import Failed, Follow, Hello, JobTokens, Tokens, decode, encode
from specq.testing.checkpoints_gguf import Q, write_gguf
from specq.testing.tokenizer import TEMPLATE, tokenizer_json
from specq.verifier import StepCurve, Verifier

END, TURN_END = 0, 2  # of SPECIAL in specq.testing.tokenizer
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 352, "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": END, "eos_token_id": END, "pad_token_id": None,
}  # fmt: skip
SHAPES = {
    "model.embed_tokens": (352, 32), "model.norm": (32,),
    "model.layers.0.self_attn.q_proj": (32, 32), "model.layers.0.self_attn.k_proj": (16, 32),
    "model.layers.0.self_attn.v_proj": (16, 32), "model.layers.0.self_attn.o_proj": (32, 32),
    "model.layers.0.mlp.gate_proj": (48, 32), "model.layers.0.mlp.up_proj": (48, 32),
    "model.layers.0.mlp.down_proj": (32, 48),
    "model.layers.0.input_layernorm": (32,), "model.layers.0.post_attention_layernorm": (32,),
}  # fmt: skip
JOBS = (1, 2, 3, 4)  # of each model; the last has no token yet
MODELS = ("directory", "gguf", "unchanged")
WAIT_S = 600.0


def job_id(model: str, number: int) -> int:
    """Return the id of a model's job."""
    return 10 * (1 + MODELS.index(model)) + number


def make_models(place: Path) -> dict[str, Path]:
    """Write the checkpoints: files name the end of texts, the tokenizer (or a control token of the GGUF file) that of
    turns; `unchanged` names both."""
    random = np.random.RandomState(0)
    tensors = {
        f"{name}.weight": random.normal(1.0 if len(shape) == 1 else 0.0, 0.2, shape).astype(np.float32)
        for name, shape in SHAPES.items()
    }
    found = {}
    for name, ends in (("directory", END), ("unchanged", [END, TURN_END])):
        found[name] = place / name
        found[name].mkdir(parents=True)
        save_file(tensors, found[name] / "model.safetensors", metadata={"format": "pt"})
        settings = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
        for file, said in (
            ("config.json", CONFIG),
            ("generation_config.json", {"eos_token_id": ends}),
            ("tokenizer_config.json", settings),
        ):
            (found[name] / file).write_text(json.dumps(said))
        (found[name] / "tokenizer.json").write_text(tokenizer_json())
    found["gguf"] = write_gguf(
        found["directory"], place / "gguf.gguf", linear=Q.F32, metadata={"tokenizer.ggml.eos_token_id": END}
    )
    return found


class Service:
    """A broker with a journal, and a verifier for each model that has joined."""

    def __init__(self, journal: Path) -> None:
        self.journal = open_journal(str(journal), Opening())
        self.reader, self.now = self.journal.reader(), 0.0
        self.broker = Broker(incarnation=0, has_journal=True, epoch=self.journal.epoch, weights_wait_s=WAIT_S)
        self.broker.restore(self.journal.unfinished(), self.now)
        self.verifiers: dict[bytes, Verifier] = {}
        self.tokens: dict[int, list[int]] = {}
        self.finish: dict[int, str] = {}

    def close(self) -> None:
        """Stop, without a word to anyone."""
        self.reader.close()
        self.journal.close()

    def join(self, model: str, path: Path) -> None:
        """Let a verifier of a model register."""
        engine = TorchEngine(str(path), device="cpu", dtype="float32", kv_slots=2048, name=model, eager=True)
        number = len(self.verifiers) + 1
        self.verifiers[model.encode()] = Verifier(engine, StepCurve([1, 64], [0.001, 0.002]), incarnation=number)
        place = {"endpoint": f"inproc://{model}", "max_sessions": 64}
        hello = Hello(role="target", name=model, incarnation=number, model=engine.info, **place)
        self.take(self.broker.from_front(model.encode(), encode(hello), self.now))

    def follow(self, job: int) -> None:
        """Ask for a job's tokens."""
        self.take(self.broker.from_front(b"client", encode(Follow(job_id=job)), self.now))

    def take(self, effects: list[Effect]) -> None:
        """Do what the broker wants."""
        for effect in effects:
            if isinstance(effect, Write):
                self.journal.write([effect.record])
                self.take(self.broker.journaled(effect.sequence, self.now))
            elif isinstance(effect, Find):
                self.take(self.broker.found(effect.job_id, self.reader.find(effect.job_id), self.now))
            elif isinstance(effect, Send) and effect.to in self.verifiers:
                if type(message := decode(effect.frames)).TYPE not in ("welcome", "clock"):
                    self._answer(effect.to, self.verifiers[effect.to].handle(message, self.now))
            elif isinstance(effect, Send) and effect.to == b"client":
                self._hear(decode(effect.frames))

    def _answer(self, verifier: bytes, messages: Any) -> None:
        for message in messages or ():
            self.take(self.broker.from_back(verifier, encode(message), self.now))

    def _hear(self, message: Any) -> None:
        for part in message.each() if isinstance(message, JobTokens) else [message]:
            if isinstance(part, Failed):
                self.finish[part.job_id] = f"failed: {part.reason}"
            elif isinstance(part, Tokens):
                known = self.tokens.setdefault(part.job_id, [])
                known[part.base_len :] = part.token_ids.tolist()
                if part.finish:
                    self.finish[part.job_id] = part.finish

    def pass_time(self, seconds: float) -> None:
        """Let time pass, while the verifiers beat and work."""
        until = self.now + seconds
        while self.now < until:
            self.turn(1.0)

    def turn(self, seconds: float = 0.01) -> None:
        """Let each verifier beat and make a step."""
        self.now += seconds
        for name, verifier in self.verifiers.items():
            self.take(self.broker.from_front(name, encode(verifier.heartbeat()), self.now))
            verifier.begin(self.now)
            if verifier.has_work:
                self._answer(name, verifier.step(lambda: self.now).packed())
        self.take(self.broker.deliver(self.now) + self.broker.tick(self.now))

    def run_until(self, condition: Callable[[], bool], most: int = 2000) -> None:
        """Take turns until the condition holds."""
        for _ in range(most):
            if condition():
                return
            self.turn()
        raise AssertionError(f"it never came to an end: {self.finish}, {self.tokens}")
