//! The correct protocol keeps every property in every state of every small world.

#![allow(clippy::unwrap_used)]

use graphile_worker_model::{Protocol, Setup, State};
use stateright::{Checker, Model};
use std::time::Instant;

/// More threads are faster; one finds the shortest counterexamples.
fn threads() -> usize {
    std::env::var("MODEL_THREADS").ok().and_then(|threads| threads.parse().ok()).unwrap_or(2)
}

/// Visits all states, and prints how many there are.
fn check(theme: &str, setup: Setup) {
    let began = Instant::now();
    let checker =
        Protocol::new(setup).checker().threads(threads()).symmetry_fn(State::representative).spawn_dfs().join();
    println!(
        "{theme}: {} unique states, depth {}, {:.1} s",
        checker.unique_state_count(),
        checker.max_depth(),
        began.elapsed().as_secs_f64()
    );
    let broken: Vec<String> = checker
        .discoveries()
        .into_iter()
        .map(|(property, path)| format!("{property}:\n{:#?}", path.into_actions()))
        .collect();
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

macro_rules! worlds {
    ($($theme:ident)*) => {
        $(
            #[test]
            fn $theme() {
                check(stringify!($theme), Setup::$theme());
            }
        )*
    };
}

worlds! {
    lost_answers two_lanes queue keys row_locks row_locks_of_a_queue recovery_of_keyed_jobs deaths recovery_of_queues
    names
}
