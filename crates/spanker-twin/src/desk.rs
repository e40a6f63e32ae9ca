// SPDX-License-Identifier: Apache-2.0
//! What a program asks a keeper, over the socket in the twin's directory.
