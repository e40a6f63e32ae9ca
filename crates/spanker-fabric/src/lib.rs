// SPDX-License-Identifier: Apache-2.0
//! Fabrics that move bytes between ranks, and the executor that runs schedules over them
