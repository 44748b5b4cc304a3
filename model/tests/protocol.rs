//! The correct protocol keeps every property in every state of every small configuration.
//!
//! `MODEL_LARGER=1` checks larger configurations, which takes hours and tens of gigabytes; name one test.

use graphile_worker_model::{Protocol, Setup, State};
use stateright::{Checker, HasDiscoveries, Model};
use std::time::Instant;

/// Visits all states, and prints how many there are.
#[track_caller]
fn check(theme: &str, setup: Setup) {
    let setup = if std::env::var_os("MODEL_LARGER").is_some() { setup.larger() } else { setup };
    let began = Instant::now();
    let checker = Protocol::new(setup.clone()).checker().threads(2).finish_when(HasDiscoveries::AnyFailures);
    let checker = checker.symmetry_fn(State::representative).spawn_dfs().join();
    println!(
        "{theme}: {} unique states, depth {}, {:.1} s",
        checker.unique_state_count(),
        checker.max_depth(),
        began.elapsed().as_secs_f64()
    );
    if let Some(property) = checker.discoveries().into_keys().next() {
        panic!("{theme}: not \"{property}\" {}", counterexample(setup, property));
    }
}

/// A short way to break the property: a search in breadth finds it.
fn counterexample(setup: Setup, property: &'static str) -> String {
    let checker = Protocol::new(setup).checker().finish_when(HasDiscoveries::AnyOf([property].into()));
    let path = checker.spawn_bfs().join().discovery(property);
    let actions: Vec<String> =
        path.into_iter().flat_map(|path| path.into_actions()).map(|action| format!("{action:?}")).collect();
    format!("after {} steps: {}", actions.len(), actions.join(", "))
}

macro_rules! configurations {
    ($($theme:ident)*) => {
        $(
            #[test]
            fn $theme() {
                check(stringify!($theme), Setup::$theme());
            }
        )*
    };
}

configurations! {
    lost_answers two_workers_lose_answers two_lanes queue keys keys_of_failed_jobs keys_in_a_queue row_locks
    row_locks_of_a_queue row_locks_and_two_lanes deaths recovery_of_keyed_jobs recovery_of_queues
    recovery_with_two_lanes recovery_after_a_loss names
    failover failover_with_faults failover_of_two_workers failover_of_two_lanes failover_of_keyed_jobs unlocks
    unlocks_of_a_queue unlocks_and_two_lanes
}
