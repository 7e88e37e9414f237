"""What ranks have when they start: the fork server imports this, and they are forked from it. A first capture, a first
compiled program and a first model of Hugging Face import modules for seconds each; and here are the captures of the
models that many tests train."""

import gc
from importlib import import_module

import tqdm
from meshwright.compiler.frontend.padding import capture_padded

from tests.support.capture_cache import keep_captures
from tests.support.zoo import ZOO

for name in ("meshwright.api", "torch._inductor.compile_fx"):
    import_module(name)
tqdm.tqdm.monitor_interval = 0  # a thread does not survive a fork
keep_captures()
for make in ZOO.values():
    model, args, kwargs = make(8, device="meta")
    capture_padded(model, args, kwargs, (), None, None, loss_fn=None)
gc.collect()
gc.freeze()  # half a million objects that no collection, and no count of live tensors, has to visit on every rank
