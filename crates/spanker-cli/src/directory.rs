// SPDX-License-Identifier: Apache-2.0
//! Which cards a flag means.

pub(crate) use spanker_engine::CardList;
pub(crate) use spanker_engine::directory::{
    HINT, alive, blamed, chosen, find, first, list, nature, open,
};
