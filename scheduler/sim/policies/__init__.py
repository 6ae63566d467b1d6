"""How others route, as pure functions over our columns: models to compare with, each by the name its project has.

Each file says the formula, where it is published, and every setting with its default there. They choose among the same
workers, with the same predictions at hand, and what they choose is carried out by the same data plane. Two things are
alike in all of them:

fetch: whether the blocks that the chosen node lacks come from whoever has them. False is what their routers do: none of
them moves KV between prefill nodes. True lends them ours.
A worker of role both takes both parts, and is judged by both.
"""
