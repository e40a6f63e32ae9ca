// SPDX-License-Identifier: Apache-2.0
//! The public face: topology, collectives and the split decision for a group of cards
