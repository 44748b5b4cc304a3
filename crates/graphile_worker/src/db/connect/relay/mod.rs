//! The relay: connects for the driver if the parameters ask for something that the driver cannot do.
//!
//! - **Trust only in `sslrootcert`.** The driver adds the file to the system's authorities. libpq trusts the file alone, and
//!   otherwise `verify-ca` is worthless, because public authorities sign certificates for anyone.
//! - **TCP keepalives.** The driver gives no access to its sockets, and a handler's query waits for ever on a silent
//!   network.
//!
//! The driver connects to a local socket of this process instead. A thread accepts it, connects to the server, verifies its
//! certificate, and passes bytes on. Only this process may connect to the socket: the connection to the server may carry a
//! client certificate. Errors travel as PostgreSQL's own error messages; [`original`] turns them back.

#[cfg(unix)]
mod unix;

#[cfg(unix)]
pub(crate) use unix::folder;

use sqlx::postgres::PgDatabaseError;
use std::io;
use std::time::Duration;

/// Marks errors that come from here and not from the server.
const ROUTINE: &str = "graphile_worker relay";

/// Where to connect, and how.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct Route {
    pub(crate) host: String,
    pub(crate) port: u16,
    /// `None` if the driver encrypts by itself, or not at all.
    pub(crate) trust: Option<Trust>,
    pub(crate) keepalive: Keepalive,
}

/// Which server certificates to accept. Certificates and keys are files, or PEM texts.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct Trust {
    pub(crate) root_cert: String,
    /// Whether the certificate has to name the host.
    pub(crate) checks_name: bool,
    pub(crate) client_cert: Option<(String, String)>,
}

/// When the operating system closes a connection whose peer is silent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Keepalive {
    pub(crate) is_on: bool,
    pub(crate) idle: Duration,
    pub(crate) interval: Duration,
    pub(crate) count: u32,
    /// How long sent data may stay unacknowledged. Not set by default, as in libpq: a live server may stop reading for a
    /// while, for example because a `copy` waits for a lock.
    pub(crate) user_timeout: Option<Duration>,
}

/// Defaults: roughly as fast as the worker's own connections notice a silent peer.
impl Default for Keepalive {
    fn default() -> Keepalive {
        let seconds = Duration::from_secs;
        Keepalive { is_on: true, idle: seconds(20), interval: seconds(5), count: 3, user_timeout: None }
    }
}

/// This system has no suitable sockets.
#[cfg(not(unix))]
pub(crate) fn folder(route: &Route) -> io::Result<std::path::PathBuf> {
    let advice = match route.trust {
        Some(_) => "sslrootcert=FILE is not supported on this system: use sslrootcert=system and sslmode=verify-full",
        None => "tcp_user_timeout and keepalives_… are not supported on this system: leave them out",
    };
    Err(io::Error::new(io::ErrorKind::InvalidInput, advice))
}

/// The kinds of errors that callers distinguish.
const KINDS: [(&str, io::ErrorKind); 6] = [
    ("refused", io::ErrorKind::ConnectionRefused),
    ("timeout", io::ErrorKind::TimedOut),
    ("certificate", io::ErrorKind::InvalidData),
    ("file", io::ErrorKind::InvalidInput),
    ("tls", io::ErrorKind::Unsupported),
    ("other", io::ErrorKind::NotConnected),
];

/// The error that the driver would have had without a relay.
pub(crate) fn original(error: sqlx::Error) -> sqlx::Error {
    let sqlx::Error::Database(of_database) = &error else { return error };
    let Some(found) = of_database.try_downcast_ref::<PgDatabaseError>() else { return error };
    if found.routine() != Some(ROUTINE) {
        return error;
    }
    let text = found.message().to_owned();
    match KINDS.iter().find(|(name, _)| Some(*name) == found.file()) {
        Some((_, io::ErrorKind::Unsupported)) => sqlx::Error::Tls(text.into()),
        Some((_, kind)) => sqlx::Error::Io(io::Error::new(*kind, text)),
        None => error,
    }
}
