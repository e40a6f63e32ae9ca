#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""llama.cpp's server on a free port of this machine, from the PyPI package xllamacpp, until it is told to end.

Prints the address that it listens at, in one line.
"""
import argparse
import signal
import sys

import xllamacpp


def main():
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("model")
    flags.add_argument("-t", "--threads", type=int, default=2)
    flags.add_argument("-np", "--parallel", type=int, default=16)
    flags.add_argument("-c", "--ctx-size", type=int, default=2048, help="tokens of each request")
    args = flags.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path = args.model
    params.cpuparams.n_threads = args.threads
    params.cpuparams_batch.n_threads = args.threads
    params.n_parallel = args.parallel
    params.n_ctx = args.ctx_size * args.parallel
    params.n_gpu_layers = 0
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.warmup = True
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.sigwait({signal.SIGINT, signal.SIGTERM})
    sys.stdout.flush()


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    main()
