import { shout } from "../../lib/shout.mjs";

export default async (payload, { query, job }) => {
  const value = { text: shout(payload.text), task: job.task_identifier };
  await query("insert into noted (task, value) values ('module', $1)", [JSON.stringify(value)]);
};
