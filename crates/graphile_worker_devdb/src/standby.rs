//! Standbys: a copy of a running cluster that follows it by streaming replication, until it is promoted.
//!
//! The copy uses PostgreSQL's backup functions instead of pg_basebackup: not every installation has that
//! program (the builds on npm do not), and it rejects servers that are newer than itself.

use crate::cluster::{Folder, write_private};
use crate::error::Context;
use crate::programs::ServerUser;
use crate::{Cluster, ClusterOptions, Error};
use sqlx::{Connection, PgConnection};
use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;

/// Files that a standby creates or fetches itself, or that belong to the primary's processes. Folders are
/// created empty.
const NOT_COPIED: [&str; 5] = ["pg_wal", "pg_replslot", "pg_stat_tmp", "postmaster.pid", "postmaster.opts"];

impl Cluster {
    /// Creates and starts a standby of this cluster in the folder of these options, and deletes what was
    /// there. The standby is read-only and follows by streaming replication. Settings such as
    /// `max_connections` must be at least those of this cluster. Replication is asynchronous unless this
    /// cluster sets `synchronous_standby_names`.
    pub async fn standby(&self, options: ClusterOptions) -> Result<Cluster, Error> {
        let folder = options.prepare()?;
        {
            let _only_us = folder.lock()?;
            folder.discard_cluster()?;
            self.copy_to(&folder).await?;
        }
        options.open()
    }

    /// Promotes this standby to a primary. Returns when it accepts writes.
    pub fn promote(&self) -> Result<(), Error> {
        self.folder.pg_ctl(&["promote", "-w", "-t", "120"])
    }

    async fn copy_to(&self, folder: &Folder) -> Result<(), Error> {
        let context = || "copy a running server".to_owned();
        let has_new_names = self.folder.programs.major().parse::<u32>().is_ok_and(|major| major >= 15);
        let (begin, end) = if has_new_names {
            ("select pg_backup_start('standby', true)::text", "select labelfile from pg_backup_stop(false)")
        } else {
            (
                "select pg_start_backup('standby', true, false)::text",
                "select labelfile from pg_stop_backup(false, false)",
            )
        };
        // Both in one session.
        let mut session = PgConnection::connect_with(&self.options("postgres")).await.context(context)?;
        sqlx::query(begin).execute(&mut session).await.context(context)?;
        let (unfinished, owner) = (folder.server().join("data.unfinished"), &folder.server_user);
        let _ = fs::remove_dir_all(&unfinished);
        copy_data(&self.folder.data(), &unfinished, owner)?;
        let label: String = sqlx::query_scalar(end).fetch_one(&mut session).await.context(context)?;
        session.close().await.context(context)?;

        let mut settings = fs::read_to_string(unfinished.join("postgresql.auto.conf")).context(context)?;
        let (port, password) = (self.port, &self.password);
        settings
            .push_str(&format!("primary_conninfo = 'host=127.0.0.1 port={port} user=postgres password={password}'\n"));
        for (name, text) in [("backup_label", &*label), ("standby.signal", ""), ("postgresql.auto.conf", &*settings)] {
            write_private(&unfinished.join(name), text)?;
            chown_to(&unfinished.join(name), owner)?;
        }
        write_private(&folder.path().join("password"), password)?;
        fs::rename(&unfinished, folder.data()).context(|| "rename the copy".to_owned())
    }
}

/// Copies a data folder that is in use. Files that disappear meanwhile were temporary.
fn copy_data(from: &Path, to: &Path, owner: &ServerUser) -> Result<(), Error> {
    fs::create_dir(to).context(|| format!("create {}", to.display()))?;
    fs::set_permissions(to, fs::Permissions::from_mode(0o700))
        .context(|| format!("close {} to others", to.display()))?;
    chown_to(to, owner)?;
    for entry in fs::read_dir(from).context(|| format!("read {}", from.display()))? {
        let entry = entry.context(|| format!("read {}", from.display()))?;
        let (path, copy) = (entry.path(), to.join(entry.file_name()));
        let is_left_out = NOT_COPIED.iter().any(|name| entry.file_name() == *name);
        match (path.is_dir(), is_left_out) {
            (true, false) => copy_data(&path, &copy, owner)?,
            (true, true) => {
                fs::create_dir(&copy).context(|| format!("create {}", copy.display()))?;
                chown_to(&copy, owner)?;
            }
            (false, true) => {}
            (false, false) => match fs::copy(&path, &copy) {
                Ok(_) => chown_to(&copy, owner)?,
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error).context(|| format!("copy {}", path.display())),
            },
        }
    }
    Ok(())
}

/// Gives a file to the user that runs the server.
fn chown_to(path: &Path, owner: &ServerUser) -> Result<(), Error> {
    let ServerUser::Other { name, uid, gid } = owner else { return Ok(()) };
    chown(path, Some(*uid), Some(*gid)).context(|| format!("give {} to {name}", path.display()))
}
