// SPDX-License-Identifier: Apache-2.0
//! One card: the ioctl ABI and a handle to the control device
