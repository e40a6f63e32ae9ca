// SPDX-License-Identifier: Apache-2.0
//! Checks of the source tree itself
