"""A batcher of a model, as `goldsmith serve` runs it, and the texts of its requests."""

import queue

from cli.finetune_tools import tiny_tokenizer
from goldsmith.hf.offload.generation import Generation, encoded, generate
from goldsmith.hf.serving.batcher import Batcher, ServingLimits
from goldsmith.hf.serving.refusals import RequestRefusal
from goldsmith.hf.serving.running_text import End, RunningText, Sampling, TextRequest
from goldsmith.hf.serving.watched_files import WatchedFiles
from goldsmith.offload import offload

LIMITS = ServingLimits(parallel=4, context=256, tokens=1024, queue=8)
PROMPTS = ("Shall I compare", "Thou", "Rough winds do shake the darling buds")


class Run:
    """A batcher of an offloaded model, and the events of its texts."""

    def __init__(self, model, place, *, limits=LIMITS, files=(), adapters=None):
        self.tokenizer = tiny_tokenizer()
        self.offloaded = offload(model.eval(), store=place / "store", device="cpu", adapter=adapters)
        self.watched = WatchedFiles(self.offloaded.engine.store, files)
        self.batcher = Batcher(self.offloaded, self.tokenizer, limits, self.watched)
        self.batcher.start()

    def text(self, prompt, tokens=16, adapter=None, **options):
        """A text that was submitted; its events come in `heard`."""
        ids = encoded(self.tokenizer, [prompt])["input_ids"][0].tolist()
        wish = {"temperature": 0.0, "top_p": None, "top_k": None, "seed": 0} | options
        events = queue.Queue()
        text = RunningText(TextRequest(adapter, ids, Sampling(tokens, **wish)), events.put)
        text.heard = events
        self.batcher.submit(text)
        return text

    def generated(self, prompt, tokens=16, **options):
        """What `goldsmith generate` computes with this model."""
        generation = Generation([])
        inputs = encoded(self.tokenizer, [prompt])
        generate(
            self.offloaded.model, self.tokenizer, [prompt], generation=generation, inputs=inputs,
            max_new_tokens=tokens, **options,
        )  # fmt: skip
        return generation.outputs[0].text

    def close(self):
        self.batcher.stop(RequestRefusal(503, "The test has ended."))
        assert self.batcher.join(20)
        self.watched.close()
        self.offloaded.close()


def whole(text):
    """The text up to its end, or its refusal."""
    pieces = ""
    while True:
        event = text.heard.get(timeout=30)
        if isinstance(event, RequestRefusal):
            return event
        if isinstance(event, End):
            return pieces
        pieces += event.text
