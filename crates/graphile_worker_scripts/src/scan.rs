//! Decides which files of a folder are tasks, what their names are, and why the other files are not tasks. `a/b/send.sh` is
//! the task `a/b/send`.
//!
//! `executable` and `host` run the files; `folder` loads and watches the folder.

use crate::host::Language;
use graphile_worker::Error;
use std::collections::BTreeMap;
use std::fs::{self, Metadata};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Maximum length of a task's name, in characters.
const LONGEST_IDENTIFIER: usize = 128;

/// Folders that contain dependencies, not tasks. Folders whose name begins with a dot are skipped as well.
const SKIPPED_FOLDERS: [&str; 2] = ["node_modules", "__pycache__"];

/// The kind of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The operating system runs it.
    Executable,
    /// A host runs it.
    Script(Language),
    /// Not a task, with the reason.
    Skipped(&'static str),
}

/// The kind of a file with this extension. As in Node's worker, JavaScript files are scripts with or without the run bit.
/// Files of other languages are scripts only without it.
fn kind(extension: &str, has_run_bit: bool, languages: &[Language]) -> Kind {
    let bare = extension.strip_prefix('.').unwrap_or_default();
    let language = languages.iter().find(|language| language.extensions().contains(&bare));
    match language {
        Some(Language::JavaScript) => Kind::Script(Language::JavaScript),
        _ if has_run_bit => Kind::Executable,
        Some(language) => Kind::Script(language.clone()),
        None => Kind::Skipped(NO_RUN_BIT),
    }
}

const NO_RUN_BIT: &str = "has no run bit: chmod +x it if it is a task";

/// If several files have the same name, the one with the lowest preference is the task. Node's worker prefers files that it
/// can load to executables and supports no other languages, so both workers choose the same file.
fn preference(extension: &str, kind: &Kind) -> (usize, usize) {
    let bare = extension.strip_prefix('.').unwrap_or_default();
    let place = |language: &Language| language.extensions().iter().position(|known| *known == bare).unwrap_or_default();
    match kind {
        Kind::Script(language @ Language::JavaScript) => (0, place(language)),
        Kind::Executable => (1, 0),
        Kind::Script(language) => (2, place(language)),
        Kind::Skipped(_) => (3, 0),
    }
}

/// Splits a file name into the task's name and all of its extensions. As in Node's worker, only letters, digits, `_` and `-`
/// are allowed.
fn name_and_extension(file: &str) -> Option<(&str, &str)> {
    if !file.split('.').all(is_name) {
        return None;
    }
    Some(file.split_at(file.find('.').unwrap_or(file.len())))
}

fn is_name(part: &str) -> bool {
    !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-')
}

/// A file that is a task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) path: PathBuf,
    pub(crate) kind: Kind,
    stamp: Stamp,
}

/// Changes if the file changes.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Stamp {
    modified: Option<SystemTime>,
    size: u64,
    mode: u32,
    inode: u64,
}

/// The contents of a folder.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Scan {
    pub(crate) tasks: BTreeMap<String, Found>,
    /// Files that are not tasks, and why.
    pub(crate) problems: BTreeMap<PathBuf, String>,
}

/// An error about the whole folder.
pub(crate) fn folder_error(folder: &Path, problem: &str) -> Error {
    Error::task_source(format!("the tasks folder {} {problem}", folder.display()))
}

/// A file that may become the task of this name.
struct Candidate {
    found: Found,
    extension: String,
    /// The path in the folder. If it is a symbolic link, `found` has the path of its target.
    shown: PathBuf,
}

impl Scan {
    /// The scan of a folder that cannot be read: it has no tasks.
    pub(crate) fn unreadable(folder: &Path, why: &Error) -> Scan {
        Scan { tasks: BTreeMap::new(), problems: BTreeMap::from([(folder.to_owned(), why.to_string())]) }
    }

    /// Reads the folder and its subfolders.
    pub(crate) fn of(folder: &Path, languages: &[Language]) -> Result<Scan, Error> {
        let tasks_dir = |problem: String| folder_error(folder, &problem);
        let metadata = fs::metadata(folder).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => tasks_dir("does not exist".to_owned()),
            _ => tasks_dir(format!("cannot be read: {error}")),
        })?;
        if !metadata.is_dir() {
            return Err(tasks_dir("is a file, expected a folder".to_owned()));
        }
        let mut scan = Scan::default();
        let mut candidates = BTreeMap::new();
        let read = scan.collect(folder, "", languages, &mut candidates);
        read.map_err(|error| tasks_dir(format!("cannot be read: {error}")))?;
        for (identifier, candidates) in candidates {
            scan.choose(identifier, candidates);
        }
        Ok(scan)
    }

    fn collect(
        &mut self,
        folder: &Path,
        prefix: &str,
        languages: &[Language],
        candidates: &mut BTreeMap<String, Vec<Candidate>>,
    ) -> std::io::Result<()> {
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            let Some(name) = path.file_name().map(|name| name.to_string_lossy().into_owned()) else { continue };
            if name.starts_with('.') || SKIPPED_FOLDERS.contains(&&*name) {
                continue;
            }
            // The file may have been deleted since the folder was listed.
            let Ok(itself) = fs::symlink_metadata(&path) else { continue };
            if itself.is_dir() {
                let read = match is_name(&name) {
                    true => self.collect(&path, &format!("{prefix}{name}/"), languages, candidates),
                    false => Err(std::io::Error::other(BAD_NAME)),
                };
                if let Err(error) = read {
                    self.problems.insert(path, error.to_string());
                }
                continue;
            }
            match candidate(&path, &name, &itself, languages) {
                Ok((name, candidate)) => {
                    candidates.entry(format!("{prefix}{name}")).or_default().push(candidate);
                }
                Err(problem) => {
                    self.problems.insert(path, problem);
                }
            }
        }
        Ok(())
    }

    /// Decides which of the files with the same name is the task, and records a problem for each of the others.
    fn choose(&mut self, identifier: String, mut candidates: Vec<Candidate>) {
        candidates.sort_by(|a, b| {
            (preference(&a.extension, &a.found.kind), &a.shown)
                .cmp(&(preference(&b.extension, &b.found.kind), &b.shown))
        });
        let length = identifier.chars().count();
        let mut candidates = candidates.into_iter();
        let Some(first) = candidates.next() else { return };
        if let Kind::Skipped(reason) = first.found.kind {
            for candidate in std::iter::once(first).chain(candidates) {
                self.problems.insert(candidate.shown, reason.to_owned());
            }
            return;
        }
        if length > LONGEST_IDENTIFIER {
            let problem = format!("has a name of {length} characters, expected at most {LONGEST_IDENTIFIER}");
            self.problems.insert(first.shown, problem);
            return;
        }
        // A file that cannot be a task, such as `send.sql`, may belong to the task of the same name.
        for other in candidates.filter(|other| !matches!(other.found.kind, Kind::Skipped(_))) {
            self.problems.insert(other.shown, format!("{identifier} is {}", first.shown.display()));
        }
        self.tasks.insert(identifier, first.found);
    }
}

const BAD_NAME: &str = "has characters in its name other than letters, digits, _ and -";

fn candidate(
    path: &Path,
    name: &str,
    itself: &Metadata,
    languages: &[Language],
) -> Result<(String, Candidate), String> {
    let (path_of_target, metadata) = if itself.is_symlink() {
        let target = fs::canonicalize(path).and_then(|target| Ok((fs::metadata(&target)?, target)));
        let (metadata, target) = target.map_err(|error| format!("is a broken symbolic link: {error}"))?;
        if metadata.is_dir() {
            return Err("is a symbolic link to a folder; such links are not followed".to_owned());
        }
        (target, metadata)
    } else {
        (path.to_owned(), itself.clone())
    };
    if !metadata.is_file() {
        return Err("is neither a file nor a folder".to_owned());
    }
    let (name, extension) = name_and_extension(name).ok_or(BAD_NAME)?;
    let stamp = stamp(&metadata);
    let kind = kind(extension, has_run_bit(stamp.mode), languages);
    let found = Found { path: path_of_target, kind, stamp };
    Ok((name.to_owned(), Candidate { found, extension: extension.to_owned(), shown: path.to_owned() }))
}

/// Only Unix has this bit, so only Unix has executables.
fn has_run_bit(mode: u32) -> bool {
    cfg!(unix) && mode & 0o111 != 0
}

#[cfg(unix)]
fn stamp(metadata: &Metadata) -> Stamp {
    use std::os::unix::fs::MetadataExt;
    let modified = metadata.modified().ok();
    Stamp { modified, size: metadata.len(), mode: metadata.mode(), inode: metadata.ino() }
}

#[cfg(not(unix))]
fn stamp(metadata: &Metadata) -> Stamp {
    Stamp { modified: metadata.modified().ok(), size: metadata.len(), mode: 0, inode: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LANGUAGES: [Language; 2] = [Language::JavaScript, Language::Python];

    #[test]
    fn names_follow_the_rules_of_nodes_worker() {
        assert_eq!(name_and_extension("send"), Some(("send", "")));
        assert_eq!(name_and_extension("send.sh"), Some(("send", ".sh")));
        assert_eq!(name_and_extension("send.d.ts"), Some(("send", ".d.ts")));
        for bad in ["send.", "a..b", "send~", "#send#", "se nd.sh", "größe.sh", "send.sh~"] {
            assert_eq!(name_and_extension(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_file_with_the_run_bit_is_an_executable_unless_node_can_load_it() {
        assert_eq!(kind("", true, &LANGUAGES), Kind::Executable);
        assert_eq!(kind(".sh", true, &LANGUAGES), Kind::Executable);
        assert_eq!(kind(".py", true, &LANGUAGES), Kind::Executable);
        assert_eq!(kind(".py", false, &LANGUAGES), Kind::Script(Language::Python));
        assert_eq!(kind(".mjs", true, &LANGUAGES), Kind::Script(Language::JavaScript));
        assert_eq!(kind(".ts", false, &LANGUAGES), Kind::Script(Language::JavaScript));
        assert_eq!(kind(".d.ts", false, &LANGUAGES), Kind::Skipped(NO_RUN_BIT));
    }

    fn chosen(files: &[(&str, bool)]) -> (Scan, Option<String>) {
        let candidate = |(file, has_run_bit): &(&str, bool)| {
            let (_, extension) = name_and_extension(file).unwrap();
            let kind = kind(extension, *has_run_bit, &LANGUAGES);
            let stamp = Stamp { modified: None, size: 0, mode: 0, inode: 0 };
            Candidate {
                found: Found { path: file.into(), kind, stamp },
                extension: extension.to_owned(),
                shown: file.into(),
            }
        };
        let mut scan = Scan::default();
        scan.choose("t".to_owned(), files.iter().map(candidate).collect());
        let chosen = scan.tasks.get("t").map(|found| found.path.display().to_string());
        (scan, chosen)
    }

    #[test]
    fn one_of_several_files_with_the_same_name_is_the_task_and_the_others_are_reported() {
        let all =
            [("t.py", false), ("t.sh", true), ("t.mts", false), ("t.ts", true), ("t.cjs", false), ("t.js", false)];
        for first in (0..all.len()).rev() {
            let (scan, chosen) = chosen(&all[..=first]);
            assert_eq!(chosen.as_deref(), Some(all[first].0));
            assert_eq!(scan.problems.len(), first);
        }
        let (scan, _) = chosen(&[("t.sh.bak", true), ("t.sh", true)]);
        assert_eq!(scan.problems[Path::new("t.sh.bak")], "t is t.sh");
    }

    #[test]
    fn a_file_that_cannot_be_a_task_is_not_reported_beside_a_task_of_its_name() {
        let (scan, chosen) = chosen(&[("t.sql", false), ("t.js.map", false), ("t.sh", true)]);
        assert_eq!((chosen.as_deref(), scan.problems.len()), (Some("t.sh"), 0));
        let (scan, chosen) = self::chosen(&[("t.sql", false)]);
        assert_eq!((chosen, &*scan.problems[Path::new("t.sql")]), (None, NO_RUN_BIT));
    }
}
