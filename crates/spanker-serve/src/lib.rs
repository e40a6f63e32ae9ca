// SPDX-License-Identifier: Apache-2.0
//! The engine's service over HTTP: the API that OpenAI's clients speak, answers that are held to JSON schemas, tools,
//! metrics, and a page.
//!
//! Requests are read here, and answers are written; what a model does with them is the engine's business. A
//! [`Server`] listens before its model is loaded, and whatever a client does, neither other clients nor the model's
//! thread wait for it:
//!
//! - What comes from outside is bounded: bodies, heads, connections, time, and what a schema may cost.
//! - Updates go through a bounded channel. A client that does not read is given up, one that goes away is stopped.
//! - A field that is known and makes no sense is an error that names it; one that is not known is ignored.
#![forbid(unsafe_code)]

mod answers;
mod app;
mod assembly;
mod backend;
mod body;
mod chat;
mod completion;
mod error;
mod generate;
mod grammar;
mod guard;
mod head;
mod info;
mod key;
mod metrics;
mod openapi;
mod options;
mod page;
mod reply;
mod request;
mod routes;
mod server;
mod socket;
mod texts;
mod tls;
mod tools;

pub use backend::Backend;
pub use options::{HttpLimits, ServeError, ServeOptions, TlsFiles};
pub use server::{Handle, Server};
