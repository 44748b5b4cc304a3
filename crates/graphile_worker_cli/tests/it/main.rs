//! The binary, run as a person would.

#![allow(missing_docs, clippy::unwrap_used)]

mod schema_only;
mod support;
