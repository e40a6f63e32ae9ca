// SPDX-License-Identifier: Apache-2.0
//! Collective schedules as data, the algorithms that build them and the verifier that proves them
