"""The program of a rank that is not rank 0. ranks.py starts it."""

from __future__ import annotations

from specengine.engine.garbage import importing

if __name__ == "__main__":
    with importing():
        from specengine.engine.parallel.follower import main
    main()
