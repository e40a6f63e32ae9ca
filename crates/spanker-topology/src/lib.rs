// SPDX-License-Identifier: Apache-2.0
//! Cards, links and their states, as plain data
