"""transformers' model split between GPU and CPU by accelerate."""

from __future__ import annotations

import torch

from .plain import TransformersEngine


class AccelerateEngine(TransformersEngine):
    """transformers' model split between GPU and CPU by accelerate, with a budget for the experts."""

    def load(self) -> str:
        from accelerate import dispatch_model, infer_auto_device_map

        super().load()
        device = torch.device(self.options["device"])
        dense = sum(p.nbytes for name, p in self.model.named_parameters() if ".experts." not in name)
        room = self.options["budget_bytes"] + dense
        places = infer_auto_device_map(
            self.model, {device.index or 0: room, "cpu": 1 << 50}, no_split_module_classes=["Qwen3MoeDecoderLayer"]
        )
        self.model = dispatch_model(self.model, places, main_device=device.index or 0)
        on_gpu = sum(place != "cpu" for name, place in places.items() if ".layers." in name)
        return f"{on_gpu} layers on the GPU"
