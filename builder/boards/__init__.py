"""Boards that run kernels and whole models: this machine, or others over TVM's RPC.

From `tune` to a board and back::

    interface                    the interface of boards to tuning, and the result of a measurement
    ├── local_board              this machine
    └── rpc_boards               every board of an RPC tracker: spreads the work, drops boards that fail
        └── tracker_client       asks the tracker for a free board
    measuring_process            starts the process that measures, waits with a time limit, and can kill it
    measuring_session            the program of that process: holds the session with the board
    remote_functions             run on the board: report its state, run and profile bundles
    ledger                       the work of each board, and whether it ran at full speed

`remote_run` is `builder.run` and `builder.profile` on a board. `rpc_servers` starts a board's server and the
workstation's tracker; `ssh_board` does so through an ssh tunnel.
"""
