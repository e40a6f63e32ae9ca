// SPDX-License-Identifier: Apache-2.0
//! Ranks that are processes, on one host or several, over the machine's MPI.
