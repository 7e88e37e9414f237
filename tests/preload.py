"""What ranks have when they start: the fork server imports this, and they are forked from it. A first capture, a first
compiled program and a first model of Hugging Face import modules for seconds each; and the captures of the models that
many tests train."""

import tqdm
from captures import keep_captures
from meshwright.compiler.padding import capture_padded
from zoo import ZOO

import meshwright.api  # isort: skip
import torch._inductor.compile_fx  # isort: skip

tqdm.tqdm.monitor_interval = 0  # a thread does not survive a fork
keep_captures()
for make in ZOO.values():
    model, args, kwargs = make(8, device="meta")
    capture_padded(model, args, kwargs, (), None, None, loss_fn=None)
