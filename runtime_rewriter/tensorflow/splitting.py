"""Whether the update of a variable can run on each part of it separately."""

from __future__ import annotations

from runtime_rewriter.tensorflow.graph_view import TensorName
from runtime_rewriter.tensorflow.updates import Update, Updates

_ELEMENTWISE = """
Abs Add AddN AddV2 Cast Div DivNoNan Equal Erf Exp Expm1 Greater GreaterEqual Identity IsFinite
IsInf IsNan Less LessEqual Log Log1p LogicalAnd LogicalNot LogicalOr Maximum Minimum Mul MulNoNan
Neg NotEqual OnesLike Pow RealDiv Reciprocal Relu Rsqrt Select SelectV2 Sigmoid Sign Sqrt Square
SquaredDifference StopGradient Sub Tanh Xdivy ZerosLike
"""
_WRITERS = """
AssignAddVariableOp AssignSubVariableOp AssignVariableOp ResourceApplyAdaMax ResourceApplyAdadelta
ResourceApplyAdagrad ResourceApplyAdagradV2 ResourceApplyAdam ResourceApplyAdamWithAmsgrad
ResourceApplyAddSign ResourceApplyCenteredRMSProp ResourceApplyFtrl ResourceApplyFtrlV2
ResourceApplyGradientDescent ResourceApplyKerasMomentum ResourceApplyMomentum
ResourceApplyPowerSign ResourceApplyProximalAdagrad ResourceApplyProximalGradientDescent
ResourceApplyRMSProp
"""
_DIVISIBLE = frozenset([*_ELEMENTWISE.split(), *_WRITERS.split(), "ReadVariableOp"])


def divided_nodes(updates: Updates, update: Update) -> frozenset[str] | str:
    """Return the nodes that each part needs for itself, or the reason why there are none.

    These are the nodes that handle whole tensors of the variable's shape. They must work element
    by element: a node that mixes elements (a norm of the gradient) needs the whole.
    """
    training = updates.training
    shape = training.by_name[update.variable].shape
    gradient = training.gradient_of[update.variable]
    if gradient.sparse:
        return "its gradient has rows"
    for slot in update.slots:
        if training.by_name[slot].shape != shape:
            return f"its slot {slot!r} has another shape"
    held = {update.variable, *update.slots}
    divided: set[str] = set()
    view, shapes = training.view, training.types.shapes
    for name in sorted(update.nodes, key=view.turns.__getitem__):
        node, inputs = view.nodes[name], view.inputs[name]
        if not any(_is_whole(one, held, divided, gradient.values) for one in inputs):
            continue
        if node.op not in _DIVISIBLE:
            return f"{name!r} ({node.op}) does not work element by element"
        for one in inputs:
            whole = _is_whole(one, held, divided, gradient.values)
            if not whole and shapes[one] not in ((), shape):
                return f"{name!r} broadcasts {one.node!r} of shape {shapes[one]}"
        divided.add(name)
    return frozenset(divided)


def _is_whole(tensor: TensorName, held: set[str], divided: set[str], gradient: TensorName) -> bool:
    return tensor == gradient or tensor.node in held or tensor.node in divided
