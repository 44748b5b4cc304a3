//! A model of the protocol between the workers and the database, checked exhaustively for small sizes: every order
//! in which workers, exchanges, faults, sweeps and the application can act.
//!
//! The engine's tests show that the protocol works in the orders that they try. This model shows that no order breaks
//! it, for a few jobs, one or two workers and a bounded number of faults. It has no SQL and no I/O: `README.md` says
//! which line of the engine each rule stands for.
//!
//! | question | file |
//! | --- | --- |
//! | What does the database do in one atomic step? | `database.rs` |
//! | What does a worker keep in memory, and what does it do with it? | `worker.rs` |
//! | What can happen next, and what is a fault? | `actions.rs` |
//! | What must hold in every state? | `invariants.rs` |
//! | Which small configurations are checked, and which bugs can be planted? | `setup.rs` |
//!
//! ```
//! use graphile_worker_model::{Protocol, Setup};
//! use stateright::{Checker, Model};
//!
//! Protocol::new(Setup::names()).checker().spawn_bfs().join().assert_properties();
//! ```

mod actions;
mod database;
pub mod invariants;
mod setup;
mod worker;

pub use actions::{Action, Protocol, State};
pub use setup::{Bug, Setup};
