-- What the next release changes, in the tests of live upgrades: workers of this one register in a way that it refuses.
alter table :"schema"._rs_workers add column next_release boolean not null default true;
