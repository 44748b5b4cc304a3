module.exports = async (payload, { addJob }) => {
  await addJob("added", payload);
};
