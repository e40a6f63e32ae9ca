// SPDX-License-Identifier: Apache-2.0
//! GGML's quantised blocks and the matrix products over them
