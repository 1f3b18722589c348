"""A rank trains with and without all logits, then a model that computes with them."""

from head_trainings import logged, model, trained
from programs.run import folder, tell

options = {"optim": "sgd", "learning_rate": 0.1, "ddp_timeout": 60}
chunked = trained(folder, model("gpt2"), chunked_cross_entropy=True, **options)
plain = trained(folder, model("gpt2"), **options)
try:
    trained(folder, model("gemma2"), chunked_cross_entropy=True, **options)
except ValueError as error:
    tell({"chunked": logged(chunked), "plain": logged(plain), "error": str(error)})
