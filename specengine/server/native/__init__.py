"""/generate: SGLang's native endpoint. `fields.py` is what it takes, `answer.py` what it gives."""
