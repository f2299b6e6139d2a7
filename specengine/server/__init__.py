"""HTTP: the OpenAI-compatible endpoints, SGLang's /generate, metrics, admin routes.

Start with app.py, which has the routes, then follow a chat: chat_plan.py makes a prompt, sampling
parameters and a parser of the body, job.py runs the prompts on a ServedEngine (service.py),
generation.py answers whole or in events. dialect.py chooses among the formats in tools/ and
reasoning/; parsing/ reads answers. native/ and responses/ have one endpoint each. run.py serves in
one process, processes/ in several.
"""
