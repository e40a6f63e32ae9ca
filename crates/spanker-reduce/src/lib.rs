// SPDX-License-Identifier: Apache-2.0
//! Collectives over buffers in one address space, at the speed of the memory
