"""Table of Dynamo's messages for code that cannot be captured, with the reason and the fix."""

from __future__ import annotations

# (pattern in Dynamo's message, what the model does, fix)
REFUSALS = (
    (
        r"source-less requires_grad_\(\)|returning intermediate with requires_grad_",
        "differentiates by a tensor that it calls requires_grad_() on itself, which Dynamo cannot trace",
        "write the gradient as a function, torch.func.grad(lambda x: self.energy(x).sum())(x), or pass that tensor as "
        "an input with requires_grad=True",
    ),
    (
        r"_checkpoint_without_reentrant_generator|_composable/checkpoint_activation\.py",
        "has a module under the composable checkpoint, whose hooks cannot be traced",
        "wrap it with checkpoint_wrapper, or call torch.utils.checkpoint.checkpoint in forward",
    ),
    (
        "`pack_padded_sequence`",
        "packs a sequence, whose sizes depend on the values of lengths",
        "run the layer on the padded tensor, and take of each row what its length says",
    ),
    (
        r"`aten\._ctc_loss|loss_ctc\.py",
        "computes a CTC loss (ctc_loss), in which sizes depend on the values of lengths",
        "take it outside of the compiled module, of the outputs that this returns without loss= and without labels: "
        "each rank takes the mean of its rows",
    ),
    (
        "wrap sparse Tensor|SparseCPU|SparseCUDA|[Ss]parse (?:CSR )?tensors",
        "computes with a sparse tensor, which no rank can hold a shard of",
        "keep its indices and values as plain tensors (index_select, then index_add), or make it dense",
    ),
    (
        r"a random number of Python's|\bRandom\.(?:random|choice|shuffle|sample|uniform|gauss|getrandbits)",
        "draws a random number of Python's, which a program would keep as a constant",
        "draw it with torch (torch.rand(()), torch.randint) and keep it a tensor, or draw it outside and pass it as a "
        "tensor",
    ),
    (
        r"the grad mode in a reentrant checkpoint",
        "asks in a reentrant checkpoint whether gradients are recorded: one device runs this code twice, in forward "
        "without gradients and in backward with them",
        "pass use_reentrant=False to the checkpoint",
    ),
    (
        "a reentrant checkpoint of inputs without gradients",
        "runs parameters in a reentrant checkpoint none of whose arguments requires a gradient: one device gives these "
        "parameters none",
        "pass use_reentrant=False to the checkpoint",
    ),
    (
        r"gradients enabled in inference_mode\(\)",
        "enables gradients in a block of torch.inference_mode(), in which one device records none",
        "enter torch.no_grad() in the place of torch.inference_mode(), or leave out what enables gradients",
    ),
    (
        "a tensor that is not of inference mode",
        "is called in inference mode, and asks whether a view of a parameter, or a tensor that it computes after "
        "torch.inference_mode(False), requires a gradient",
        "call it under torch.no_grad() in the place of torch.inference_mode()",
    ),
    (
        r"is_inference\(\) during tracing|torch\.is_inference\b",
        "asks whether a tensor is one of inference mode, which a program does not know",
        "ask whether it requires a gradient, by h.requires_grad",
    ),
    (
        r"a backward within forward|function `backward` in file \S+autograd",
        "calls backward() in forward, and a program adds to no gradients",
        "take torch.autograd.grad(loss, params) there, or return the loss and call backward() on that",
    ),
    (
        r"ignore_fresh_unbacked_symbols|while_loop",
        "loops until a tensor says so, and a program looks at no values",
        "write a loop of Python over a fixed number of steps, with torch.where for those that shall change nothing",
    ),
    (
        r"shape_env must not be None|nested_tensor",
        "makes a nested tensor, whose sizes depend on values",
        "pad its rows to one length, and mask what is padded",
    ),
    (
        "the gradient of a parameter or an input",
        "reads or sets the .grad of a parameter or an input in forward, where a program has none",
        "do that between steps, outside of forward",
    ),
    (
        "a hook of a parameter or an input",
        "registers a hook of a parameter or an input in forward, which each call would register again",
        "register it once, on the compiled module's parameter; of an input, register it on a tensor computed of it",
    ),
    (
        r"Unsupported Tensor\.requires_grad_\(\) call|setattr\(\) on Tensor\.requires_grad",
        "changes in forward whether a tensor requires a gradient",
        "use h.detach() for what shall have none, or set requires_grad of parameters and inputs before the call",
    ),
    (
        r"`Tensor\.retain_grad\(\)`",
        "calls retain_grad() in forward, and a program keeps no gradients of what it computes within",
        "return the tensor, and call retain_grad() on that",
    ),
    (
        "modified by an inplace operation",
        "changes in place what its backward needs: one device refuses that backward",
        "write the change without the underscore, so that it makes a new tensor",
    ),
    (
        r"builtin `time\.|function `time\.",
        "asks for the time, which a program would keep as a constant",
        "take the time around the call of the module",
    ),
    (
        r"numpy\.random|method `\w+` of class `(?:Generator|RandomState)`|numpy function.*default_rng",
        "draws a random number of NumPy's, which a program would keep as a constant",
        "draw it with torch (torch.rand(()), torch.randint) and keep it a tensor, or draw it outside and pass it",
    ),
    (
        r"Operator `aten\.(?:equal|allclose|is_nonzero)|aten\.(?:equal|allclose)\.default",
        "asks whether tensors are equal, and a program looks at no values",
        "keep it a tensor: (a == b).all(), or torch.isclose(a, b).all(), with torch.where in the place of if",
    ),
    (
        r"a set_ on a graph input",
        "sets the .data of a buffer",
        "change its values in place, as by self.buffer.copy_(new)",
    ),
    (
        r"function `(?:no_grad|enable_grad|set_grad_enabled|inference_mode|autocast)\.__enter__`",
        "enters a block of torch by a call, as contextlib.ExitStack does",
        "write it as a with statement: with torch.no_grad(): ...",
    ),
    (
        r"Tensor with grad_fn\(\)",
        "reads the grad_fn of a tensor, and a program has no autograd graph within",
        "ask h.requires_grad, or not h.is_leaf, in the place of h.grad_fn is not None",
    ),
    (
        "function `checkpoint_sequential`",
        "calls torch.utils.checkpoint.checkpoint_sequential, which cannot be traced",
        "call torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False) for each part",
    ),
    (
        r"`CheckpointFunction\.",
        "calls torch.utils.checkpoint.CheckpointFunction.apply, which cannot be traced",
        "call torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)",
    ),
    (
        r"\ba state, ",
        "asks for a state of torch or of the process, which a program would keep as a constant",
        "ask for it outside, and pass it as an argument or set an attribute of the model",
    ),
    (
        "maximum recursion depth exceeded",
        "calls itself without end",
        "let a method that shardc.register_forward_method makes a program call parts of the module, and not the module",
    ),
    (
        "_local_scalar_dense|data-dependent expression",
        "takes a number out of a tensor, and a program looks at no values",
        "keep it a tensor: torch.where in the place of if, and no .item(), int(), float() or bool() of it",
    ),
)
