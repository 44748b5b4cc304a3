//! The steps that a release knows: their numbers, their SQL files, and which of them are breaking. Which steps run is decided
//! in `migrate`.

/// PostgreSQL 12 is the first version with stored generated columns, which the contract's tables use.
pub(crate) const LOWEST_POSTGRES: i32 = 120_000;

/// The level of Node's ledger that the contract describes: the level of Node 0.18.
pub(crate) const LEVEL: i32 = 20;

/// Node's breaking migrations: an older worker must not run after them.
pub(super) const BREAKING: [i32; 7] = [1, 3, 11, 13, 14, 16, 19];

/// The step of our own ledger that installs the SQL functions and describes what is installed. A release that changes the
/// functions takes the next free number, so that an older release leaves them alone.
pub(super) const FUNCTIONS_STEP: i32 = 22;

/// The step of our own ledger that creates the indexes. A release that changes them takes the next free number.
pub(super) const INDEXES_STEP: i32 = 19;

/// The same step of earlier releases. It is recorded, too: otherwise such a release would create its indexes again.
pub(super) const EARLIER_INDEXES_STEP: i32 = 9;

/// The step that creates the recovery tables, in which live workers register.
pub(super) const WORKERS_STEP: i32 = 5;

/// A step of our own ledger that consists of one SQL file.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Addition {
    pub(super) step: i32,
    /// Whether workers of older releases must not run after it. They are asked to finish first.
    pub(super) breaking: bool,
    pub(super) file: &'static str,
    pub(super) what: &'static str,
}

const ADDITIONS: &[Addition] = &[
    Addition { step: 3, breaking: false, file: files::VACUUM_SETTINGS, what: "set the vacuum settings of the tables" },
    Addition { step: 4, breaking: false, file: files::CRONTAB_ITEMS, what: "create the table of crontab items" },
    Addition { step: WORKERS_STEP, breaking: false, file: files::WORKERS, what: "create the tables of recovery" },
    Addition { step: 7, breaking: false, file: files::WORKER_DETAILS, what: "add the details of workers" },
    Addition { step: 13, breaking: false, file: files::CANCELLATIONS, what: "create the table of cancellations" },
    Addition { step: 15, breaking: false, file: files::EXPIRIES, what: "create the table of expiries" },
    Addition { step: 16, breaking: false, file: files::THROTTLES, what: "create the table of throttles" },
    Addition { step: 17, breaking: false, file: files::LIMITS, what: "create the tables of limits" },
    Addition { step: 18, breaking: false, file: files::USED_NAMES, what: "protect the names that jobs use" },
    Addition { step: 21, breaking: false, file: files::SUCCESSORS, what: "create the table of successors" },
];

/// An additional breaking step for the tests of live upgrades. Only in programs that are built and started
/// for it.
#[cfg(feature = "_next_release")]
const NEXT_RELEASE: Addition =
    Addition { step: 1000, breaking: true, file: files::NEXT_RELEASE, what: "apply the next release's step" };

/// The steps of our own ledger that are SQL files, in order.
pub(super) fn additions() -> impl Iterator<Item = &'static Addition> {
    #[cfg(feature = "_next_release")]
    let next_release = std::env::var_os("GW_TEST_NEXT_RELEASE").map(|_| &NEXT_RELEASE);
    #[cfg(not(feature = "_next_release"))]
    let next_release = None;
    ADDITIONS.iter().chain(next_release)
}

/// The highest step of our own ledger that this release supports.
pub(crate) fn last_addition() -> i32 {
    additions().map(|addition| addition.step).chain([FUNCTIONS_STEP, INDEXES_STEP]).max().unwrap_or(0)
}

/// The steps, in the order of their numbers.
pub(crate) mod files {
    pub(crate) const SCHEMA: &str = include_str!("../../sql/schema/001-schema.sql");
    pub(crate) const LEDGER: &str = include_str!("../../sql/schema/002-ledger.sql");
    pub(crate) const LEDGER_BREAKING_COLUMN: &str = include_str!("../../sql/schema/003-ledger-breaking-column.sql");
    pub(crate) const TABLES: &str = include_str!("../../sql/schema/010-tables.sql");
    pub(crate) const VIEW: &str = include_str!("../../sql/schema/011-view.sql");
    pub(crate) const INTERRUPTED_MIGRATION: &str = include_str!("../../sql/schema/012-interrupted-migration.sql");
    pub(crate) const LEDGER_ENTRIES: &str = include_str!("../../sql/schema/020-ledger-entries.sql");
    pub(crate) const LEDGER_FLAGS: &str = include_str!("../../sql/schema/021-ledger-flags.sql");
    pub(crate) const ADDITIONS: &str = include_str!("../../sql/schema/100-additions.sql");
    pub(crate) const FUNCTIONS: &str = include_str!("../../sql/schema/110-functions.sql");
    pub(crate) const COMMENTS: &str = include_str!("../../sql/schema/190-comments.sql");
    pub(crate) const INDEX_COMMENTS: &str = include_str!("../../sql/schema/191-index-comments.sql");
    pub(crate) const ROLE_FUNCTIONS: &str = include_str!("../../sql/schema/112-role-functions.sql");
    pub(crate) const LIMIT_FUNCTIONS: &str = include_str!("../../sql/schema/116-limit-functions.sql");
    pub(crate) const LIMITED_EXCHANGE_FUNCTIONS: &str =
        include_str!("../../sql/schema/117-limited-exchange-functions.sql");
    pub(crate) const LIMIT_OUTCOME_FUNCTIONS: &str = include_str!("../../sql/schema/118-limit-outcome-functions.sql");
    pub(crate) const RECOVERY_FUNCTIONS: &str = include_str!("../../sql/schema/111-recovery-functions.sql");
    pub(crate) const DEBOUNCE_FUNCTIONS: &str = include_str!("../../sql/schema/115-debounce-functions.sql");
    pub(crate) const REPLACE_FUNCTIONS: &str = include_str!("../../sql/schema/119-replace-functions.sql");
    pub(crate) const EXPIRY_FUNCTIONS: &str = include_str!("../../sql/schema/114-expiry-functions.sql");
    pub(crate) const CANCELLATION_FUNCTIONS: &str = include_str!("../../sql/schema/113-cancellation-functions.sql");
    /// Name and file of each index.
    pub(crate) const INDEXES: [(&str, &str); 7] = [
        ("_rs_jobs_unqueued", include_str!("../../sql/schema/120-index-unqueued.sql")),
        ("_rs_jobs_in_queues", include_str!("../../sql/schema/121-index-queued.sql")),
        ("_rs_jobs_by_queue", include_str!("../../sql/schema/122-index-by-queue.sql")),
        ("_rs_jobs_by_kind", include_str!("../../sql/schema/123-index-by-kind.sql")),
        ("_rs_jobs_in_queues_by_task", include_str!("../../sql/schema/124-index-queued-by-task.sql")),
        ("_rs_jobs_in_use", include_str!("../../sql/schema/125-index-in-use.sql")),
        ("_rs_jobs_failed_in_lanes", include_str!("../../sql/schema/126-index-failed-in-lanes.sql")),
    ];
    /// Indexes of earlier releases, which the present ones replace.
    pub(crate) const REPLACED_INDEXES: [&str; 3] = ["_rs_jobs_by_task", "_rs_jobs_queued", "_rs_jobs_queued_by_task"];
    pub(crate) const VACUUM_SETTINGS: &str = include_str!("../../sql/schema/130-vacuum-settings.sql");
    pub(crate) const CRONTAB_ITEMS: &str = include_str!("../../sql/schema/140-crontab-items.sql");
    pub(crate) const WORKERS: &str = include_str!("../../sql/schema/150-workers.sql");
    pub(crate) const USED_NAMES: &str = include_str!("../../sql/schema/160-used-names.sql");
    pub(crate) const WORKER_DETAILS: &str = include_str!("../../sql/schema/170-worker-details.sql");
    pub(crate) const CANCELLATIONS: &str = include_str!("../../sql/schema/180-cancellations.sql");
    pub(crate) const EXPIRIES: &str = include_str!("../../sql/schema/181-expiries.sql");
    pub(crate) const THROTTLES: &str = include_str!("../../sql/schema/182-throttles.sql");
    pub(crate) const LIMITS: &str = include_str!("../../sql/schema/183-limits.sql");
    pub(crate) const SUCCESSORS: &str = include_str!("../../sql/schema/184-successors.sql");
    #[cfg(feature = "_next_release")]
    pub(crate) const NEXT_RELEASE: &str = include_str!("../../tests/it/next_release/step.sql");
    pub(crate) const OLD_LAYOUT_RENAME: &str = include_str!("../../sql/schema/900-old-layout-rename.sql");
    pub(crate) const OLD_LAYOUT_BY_NAME: &str = include_str!("../../sql/schema/901-old-layout-by-name.sql");
    pub(crate) const OLD_LAYOUT_BY_ID: &str = include_str!("../../sql/schema/902-old-layout-by-id.sql");
    pub(crate) const RUST_PORT_RETIREMENTS: &str = include_str!("../../sql/schema/905-rust-port-retirements.sql");
    pub(crate) const RUST_PORT_REMOVED: &str = include_str!("../../sql/schema/906-rust-port-removed.sql");
    pub(crate) const OLD_LAYOUT_COPY: &str = include_str!("../../sql/schema/910-old-layout-copy.sql");
}

/// The statements of `migrate` and `upgrade`, one per file.
pub(crate) mod queries {
    pub(crate) const INSTALLATION: &str = include_str!("../../sql/queries/installation.sql");
    pub(crate) const LOCK_MIGRATIONS: &str = include_str!("../../sql/queries/lock_migrations.sql");
    pub(crate) const LOCK_INDEXES: &str = include_str!("../../sql/queries/lock_indexes.sql");
    pub(crate) const UNLOCK_INDEXES: &str = include_str!("../../sql/queries/unlock_indexes.sql");
    pub(crate) const LOCK_LEDGER: &str = include_str!("../../sql/queries/lock_ledger.sql");
    pub(crate) const LEDGER: &str = include_str!("../../sql/queries/ledger.sql");
    pub(crate) const ADDITIONS: &str = include_str!("../../sql/queries/additions.sql");
    pub(crate) const FUNCTIONS_CHECKSUM: &str = include_str!("../../sql/queries/functions_checksum.sql");
    pub(crate) const RECORD_ADDITION: &str = include_str!("../../sql/queries/record_addition.sql");
    pub(crate) const COUNT_JOBS: &str = include_str!("../../sql/queries/count_jobs.sql");
    pub(crate) const CONTRACT_DIFFERENCES: &str = include_str!("../../sql/queries/contract_differences.sql");
    pub(crate) const INDEX_IS_VALID: &str = include_str!("../../sql/queries/index_is_valid.sql");
    pub(crate) const ANNOUNCE_MIGRATION: &str = include_str!("../../sql/queries/announce_migration.sql");
    pub(crate) const REQUEST_ADDITION: &str = include_str!("../../sql/queries/request_addition.sql");
    pub(crate) const REQUEST_MIGRATION: &str = include_str!("../../sql/queries/request_migration.sql");
    pub(crate) const DELETE_MIGRATION_REQUESTS: &str = include_str!("../../sql/queries/delete_migration_requests.sql");
    pub(crate) const LOCK_HOLDERS: &str = include_str!("../../sql/queries/lock_holders.sql");
    pub(crate) const LIVE_WORKERS: &str = include_str!("../../sql/queries/live_workers.sql");
    pub(crate) const RUST_PORT: &str = include_str!("../../sql/queries/rust_port.sql");
    pub(crate) const RUST_PORT_FREE_JOBS: &str = include_str!("../../sql/queries/rust_port_free_jobs.sql");
    pub(crate) const OLD_LAYOUT_LOCKS: &str = include_str!("../../sql/queries/old_layout_locks.sql");
}
